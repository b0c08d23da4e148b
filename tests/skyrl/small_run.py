"""A run of a few steps of a random model: what the end-to-end tests start, each in a process of its own.

python small_run.py MODEL OUT [key=value ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from omegaconf import OmegaConf

#: Prompts that every step samples again, each longer than a block of the prefix cache.
PROMPTS, CONTEXT, RESPONSE = 4, 128, 8


def small_config(model: Path, out: Path, overrides: list[str] = ()) -> dict:
    """Configuration of a run of 3 steps: 4 samples of each prompt, in two minibatches, at another temperature than 1."""
    out.mkdir(parents=True, exist_ok=True)
    data = out / "prompts.jsonl"
    said = ["say " + ", ".join([str(n)] * 24) for n in range(PROMPTS)]
    rows = [{"prompt": [{"role": "user", "content": text}], "env_class": "parity"} for text in said]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = OmegaConf.create(
        {
            "data": {"train_data": [str(data)], "val_data": []},
            "environment": {"env_class": "parity"},
            "trainer": {
                "strategy": "megatron",
                "policy": {"model": {"path": str(model)}, "optimizer_config": {"lr": 1e-4, "weight_decay": 0.0}},
                "algorithm": {
                    "use_kl_loss": False,
                    "policy_loss_type": "dual_clip",
                    "eps_clip_low": 0.2,
                    "eps_clip_high": 0.28,
                    "dynamic_sampling": {"type": "filter"},
                    "overlong_buffer_len": 4,
                },
                "train_batch_size": PROMPTS,
                "policy_mini_batch_size": 2,
                "micro_train_batch_size_per_gpu": 4,
                "micro_forward_batch_size_per_gpu": 8,
                "max_prompt_length": CONTEXT,
                "max_training_steps": 3,
                "eval_interval": -1,
                "eval_before_train": False,
                "ckpt_interval": -1,
                "resume_mode": "none",
                "gradient_checkpointing": False,
                "logger": "console",
                "print_example_interval": 0,
            },
            "generator": {
                "n_samples_per_prompt": 4,
                "sampling_params": {"max_generate_length": RESPONSE, "temperature": 0.7},
                "inference_engine": {
                    "enforce_eager": True,
                    "max_num_seqs": 16,
                    "max_num_batched_tokens": 256,
                    "enable_prefix_caching": True,
                },
            },
            "isoexec": {"out": str(out), "seed": 7, "environments": {"parity": "parity_env:ParityEnv"}},
        }
    )
    return OmegaConf.to_container(OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides))))


if __name__ == "__main__":
    from isoexec.runtimes.skyrl.run import train

    print(train(small_config(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])))
