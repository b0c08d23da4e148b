"""Makes the start checkpoints of the small runs: a tokenizer from text that the tasks generate, and a short supervised phase.

    python recipes/start/make.py hybrid-moe [--steps N] [--out FOLDER]
    python recipes/start/make.py dense

The model learns right answers and, in a share of its examples, answers of other problems: sampled at temperature 1 it is then right
about half of the time, and knows more than it shows, which is what reinforcement learning has to bring out within a few steps. Held-out
problems of the recipes are never seen here. Runs on the CPU, in a few minutes; same arguments, same machine, same threads: same bytes.
"""

from __future__ import annotations

import argparse
import functools
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from isoexec.train import tasks
from isoexec.verify.checkpoint import ARCHITECTURES, FP32_PARAMETERS

VOCABULARY = 1024
#: The task of the small recipes (recipes/task/chain_sum.yaml) and the held-out problems that they keep back.
TASK = tasks.Task("chain_sum", dict(min_terms=3, max_terms=3, min_digits=1, max_digits=1))
TRAIN, HELD_OUT = 3700, 256
#: Tokens of the longest answer, with its end.
ANSWER = 4
#: Generators whose text the tokenizer learns from, with their own default settings.
TEXT_FROM = (
    "chain_sum basic_arithmetic decimal_chain_sum products gcd lcm count_bits fraction_simplification power_function "
    "simple_equations prime_factorization number_sequence number_sorting number_filtering base_conversion letter_counting spell_backward "
    "calendar_arithmetic leg_counting time_intervals coin_flip complex_arithmetic count_primes"
).split()
ENTRIES = 200
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 512
#: Tokens of a Gated DeltaNet chunk.
CHUNK = 16
#: Steps of a round in which a share of the examples carries a wrong answer.
SOFT_STEPS = 100
#: Steps over which the learning rate rises.
WARM = 50

_SIZES = dict(vocab_size=VOCABULARY, hidden_size=128, max_position_embeddings=CONTEXT)
#: Name -> architecture, sizes, and the pass rate of greedy answers that ends learning.
MODELS = {
    "hybrid-moe": ("Qwen3_5MoeForCausalLM", _SIZES | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64), 0.7),
    "dense": ("Qwen3ForCausalLM", _SIZES | dict(intermediate_size=256), 0.85),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every text encodes and decodes, and each digit is a token of its own.

    Nothing else is split beforehand, so a phrase that recurs becomes one token: prompts of the task have 13 tokens, not 27.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text(), trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the text holds {tokenizer.get_vocab_size()} tokens, {VOCABULARY} are wanted: add generators")
    pad, start, end = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        eos_token=end,
        extra_special_tokens=[start],
        model_max_length=CONTEXT,
        chat_template=TEMPLATE,
    )


def text():
    """Questions and answers, those of the task most often."""
    for task, count in ((TASK, 10 * ENTRIES), *((tasks.Task(generator), ENTRIES) for generator in TEXT_FROM)):
        for entry in tasks.draw(task, count, start=0):
            yield from ("user\n", entry["question"], "assistant\n", str(entry["answer"]))


def buckets(tokenizer, entries) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Entries by the length of their prompts: (prompts [N, P], answers [N, A] padded with -100). Nothing is padded on the left."""
    by_length = {}
    for entry in entries:
        message = [{"role": "user", "content": entry["question"]}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        answer = tokenizer.encode(entry["answer"]) + [tokenizer.eos_token_id]
        by_length.setdefault(len(prompt), []).append((prompt, answer + [-100] * (ANSWER - len(answer))))
    return [tuple(map(torch.tensor, zip(*rows))) for _, rows in sorted(by_length.items())]


@torch.no_grad()
def pass_rate(model, problems, generator, temperature=1.0) -> float:
    """Share of problems answered right, sampled at ``temperature`` (0: greedy), token by token."""
    model.eval()
    right = total = 0
    for prompts, answers in problems:
        tokens = prompts
        for _ in range(answers.shape[1]):
            logits = model(tokens, logits_to_keep=1).logits[:, -1].float()
            if temperature:
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = logits.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], 1)
        said = tokens[:, prompts.shape[1] :]
        right += ((said == answers) | (answers == -100)).all(1).sum().item()
        total += len(answers)
    model.train()
    return right / total


def learn(model, problems, options, *, steps: int, rate: float, noise: float, generator, enough=None) -> None:
    """Supervised steps on answers alone.

    Args:
        problems: of :func:`buckets`.
        steps: at most; the learning rate falls to a tenth over them.
        rate: largest learning rate.
        noise: share of examples that carry the answer of another problem.
        enough: called every 100 steps with their number and the loss; true ends the phase.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.1)
    shares = torch.tensor([float(len(prompts)) for prompts, _ in problems])
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / WARM, 1 - 0.9 * step / steps)
        prompts, answers = problems[torch.multinomial(shares, 1, generator=generator).item()]
        rows, others = torch.randint(len(prompts), (2, options.batch), generator=generator)
        wrong = torch.rand(options.batch, generator=generator) < noise
        target = torch.where(wrong[:, None], answers[others], answers[rows])
        tokens = torch.cat([prompts[rows], target.clamp(min=0)], 1)[:, :-1]
        logits = model(tokens, logits_to_keep=target.shape[1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99 and enough is not None and enough(step + 1, loss.item()):
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--steps", type=int, default=1500, help="of learning, at most")
    parser.add_argument("--sampled", type=float, default=0.5, help="largest pass rate at temperature 1 of what is written")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="default: the folder of this script")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    generator, began = torch.Generator().manual_seed(options.seed), time.time()
    tokenizer = make_tokenizer()
    train, held_out = (buckets(tokenizer, entries) for entries in tasks.split(TASK, TRAIN, HELD_OUT, options.seed))
    architecture, sizes, enough = MODELS[options.model]
    model_class, config = ARCHITECTURES[architecture](sizes)
    model = model_class(config).train()
    for module in model.modules():
        if hasattr(module, "chunk_gated_delta_rule"):  # sequences here are shorter than its chunks of 64
            module.chunk_gated_delta_rule = functools.partial(module.chunk_gated_delta_rule, chunk_size=CHUNK)
    print(
        f"{architecture}: {sum(p.numel() for p in model.parameters())} parameters; a prompt: {tokenizer.decode(train[0][0][0])!r}, ", end=""
    )
    print(f"{train[0][0].shape[1]} tokens; {time.time() - began:.0f} s", flush=True)

    def measure(step, loss):
        greedy = pass_rate(model, held_out, generator, 0)
        sampled = pass_rate(model, held_out, generator)
        print(f"{step}: loss {loss:.3f}, held out {greedy:.3f} greedy, {sampled:.3f} sampled, {time.time() - began:.0f} s", flush=True)
        return greedy >= enough

    learn(model, train, options, steps=options.steps, rate=options.rate, noise=0.0, generator=generator, enough=measure)
    learn(model, train, options, steps=SOFT_STEPS, rate=options.rate / 10, noise=0.5, generator=generator)
    folder = (options.out or Path(__file__).parent) / options.model
    write(model, tokenizer, folder)
    for number in range(1, 5):
        if soften(model, train, held_out, options, number) <= options.sampled:
            break
        write(model, tokenizer, folder)


def soften(model, train, held_out, options, number: int) -> float:
    """One round of wrong answers, unless enough of the held-out problems fail already; returns their pass rate before it."""
    sampled = pass_rate(model, held_out, torch.Generator().manual_seed(options.seed))
    print(f"round {number}: held out {pass_rate(model, held_out, None, 0):.3f} greedy, {sampled:.3f} sampled", flush=True)
    if sampled > options.sampled:
        generator = torch.Generator().manual_seed(options.seed + number)
        learn(model, train, options, steps=SOFT_STEPS, rate=options.rate / 4, noise=0.55, generator=generator)
    return sampled


def write(model, tokenizer, folder: Path) -> None:
    """The checkpoint; ``model`` keeps the rounded weights."""
    for name, parameter in model.named_parameters():
        if not name.endswith(FP32_PARAMETERS):
            parameter.data = parameter.data.to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.float()


if __name__ == "__main__":
    main()
