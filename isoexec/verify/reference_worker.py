"""The judge's process: HF transformers in fp32, one unpacked sequence at a time, and the making of the checkpoint."""

from __future__ import annotations

from isoexec.verify.protocol import serve, to_bits


class ReferenceOperations:
    """Keeps the model of the last folder that was asked for."""

    def __init__(self):
        self._folder, self._model = None, None

    def make_checkpoint(self, folder: str, architecture: str, seed: int) -> None:
        """See :func:`isoexec.verify.checkpoint.make_checkpoint`."""
        from isoexec.verify.checkpoint import make_checkpoint

        make_checkpoint(folder, architecture, seed=seed)

    def score(self, model: str, sequences, temperature: float) -> list[list[int]]:
        """fp32 logprobs (bit patterns) of the generated tokens of (prompt, tokens) ``sequences``."""
        import torch

        self._load(model)
        scores = []
        with torch.inference_mode():
            for prompt, tokens in sequences:
                logits = self._model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
                rows = (logits.double() / temperature).log_softmax(-1)
                picked = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                scores.append(to_bits(picked.float().tolist()))
        return scores

    def _load(self, folder: str) -> None:
        if folder != self._folder:
            import torch
            from transformers import AutoModelForCausalLM

            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            self._folder = folder


def start() -> dict:
    """Import what the operations need, while the other processes start, and return the operations."""
    from transformers import AutoModelForCausalLM, Qwen3ForCausalLM  # noqa: F401  (lazy modules: the name imports the model's code)

    operations = ReferenceOperations()
    return {"make_checkpoint": operations.make_checkpoint, "score": operations.score}


if __name__ == "__main__":
    raise SystemExit(serve(start))
