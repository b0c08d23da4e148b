"""The ranks of tests/moe/test_expert_parallel.py: ``python ep_worker.py <folder>`` writes alone.pt and 0.pt .. 3.pt.

One process imports torch and runs the layout without ranks, then forks four: imports are most of the cost.
"""

import multiprocessing
import sys

import torch
import torch.distributed as dist

from isoexec.contract import ContractError
from isoexec.ops import moe
from isoexec.ops._core.bits import nudge
from isoexec.ops.moe.parallel import local_groups
from isoexec.ops.moe.reference import weighted_total

E, D, F, GROUPS = 16, 32, 48, 8
TOP_K = {1: (4,), 2: (1, 2, 4, 8), 4: (1, 2, 4, 8)}
TOKENS = {1: (24,), 2: (24, 0), 4: (5, 0, 12, 7)}  # rows that each rank brings


def inputs():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(24, D, generator=g).bfloat16()
    router = torch.randn(E, D, generator=g).bfloat16()
    gate_up = (torch.randn(E, 2 * F, D, generator=g) / 6).bfloat16()
    down = (torch.randn(E, D, F, generator=g) / 6).bfloat16()
    shared = torch.randn(24, D, generator=g).bfloat16()
    grad = torch.randn(24, D, generator=g).bfloat16()
    return x, router, gate_up, down, shared, grad


def run(top_k, ep, rank=0, size=1, replicated=True, plant=False):
    """{"fp32": total before rounding, "out", "grads"...} of this rank's own rows."""
    x, router, gate_up, down, shared, grad = inputs()
    if plant:
        down = nudge(down, down.abs().argmax())
    own = slice(0, 24) if replicated else slice(sum(TOKENS[size][:rank]), sum(TOKENS[size][: rank + 1]))
    held = slice(rank * E // size, (rank + 1) * E // size)
    x, shared, gate_up, down = (t.clone().requires_grad_() for t in (x[own], shared[own], gate_up[held], down[held]))
    weights, experts = moe.route(moe.router_logits(x, router), top_k=top_k, renormalize=True)
    every_x, every_weights, every_experts, rows = moe.dispatch(x, weights, experts, ep=ep)
    values = moe.expert_mlp(every_x, every_experts, gate_up, down, ep=ep)
    out = moe.combine(values, every_weights, every_experts, shared, num_experts=E, combine_groups=GROUPS, rows=rows, ep=ep)
    out.backward(grad[own])
    with torch.no_grad():
        first, groups = local_groups(E, GROUPS, ep)
        total = weighted_total(values, every_weights, every_experts, shared, first, groups, E // GROUPS, rows, ep)
        naive = weighted_total(values, every_weights, every_experts, None, first, groups, E // GROUPS, None, None)
    return {
        "fp32": total,
        "out": out.detach(),
        "x": x.grad,
        "shared": shared.grad,
        "gate_up": gate_up.grad,
        "down": down.grad,
        "partial": naive,
    }


def hostile():
    """24 rows with bits that a sum, a cast or a flush would change, as they lie over the ranks of TOKENS[4]: -0.0, subnormals, NaN payloads."""
    x = inputs()[0]
    x.view(torch.int16)[::2, :4] = torch.tensor([-0x8000, 0x0001, 0x7FC5, -0x7FFF], dtype=torch.int16)
    weights = torch.rand(24, 4, generator=torch.Generator().manual_seed(1))
    weights.view(torch.int32)[1::3, 0] = -(2**31)
    return x, weights, torch.arange(96).view(24, 4) % E


def dispatched(rank, group):
    own = slice(sum(TOKENS[4][:rank]), sum(TOKENS[4][: rank + 1]))
    return moe.dispatch(*(t[own] for t in hostile()), ep=moe.ExpertParallel(group))


def one_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    try:
        groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}
        three = dist.new_group([0, 1, 2])
        results = {}
        for size, group in groups.items():
            for replicated in (True, False) if rank < size else ():
                ep = moe.ExpertParallel(group, replicated=replicated)
                for top_k in TOP_K[size]:
                    results[size, replicated, top_k] = run(top_k, ep, rank, size, replicated)
        planted = run(8, moe.ExpertParallel(groups[4]), rank, 4, False, plant=True)
        refusal = None
        if rank < 3:
            try:
                local_groups(18, 2, moe.ExpertParallel(three))
            except ContractError as error:
                refusal = str(error)
        parts = {"results": results, "planted": planted, "refusal": refusal, "dispatched": dispatched(rank, groups[4])}
        torch.save(parts, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def main(folder):
    torch.set_num_threads(1)
    torch.save({top_k: run(top_k, None) for top_k in (1, 2, 4, 8)}, f"{folder}/alone.pt")
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=one_rank, args=(rank, folder), daemon=True) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode) for process in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
