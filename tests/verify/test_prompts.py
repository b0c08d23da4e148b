from isoexec.verify.prompts import EDGE_LENGTHS, make_prompts, packings, request_seeds
from isoexec.verify.settings import MAX_MODEL_LEN, Plan, full_plan, quick_plan


def test_lengths_cover_the_edges():
    prompts = make_prompts(48, 512, seed=20)
    lengths = [len(p) for p in prompts]
    assert len(prompts) == 48 and min(lengths) == 1 and max(lengths) == 300
    assert {1, 63, 64, 65, 127, 128, 129} <= set(lengths[:8])
    assert set(EDGE_LENGTHS) <= set(lengths)
    assert all(3 <= token < 512 for p in prompts for token in p)
    assert len({tuple(p) for p in prompts}) == 48


def test_prompts_share_prefixes_but_differ():
    prompts = [p for p in make_prompts(48, 512, seed=20)[2::3] if len(p) > 130]
    assert len(prompts) >= 4
    assert len({tuple(p[:128]) for p in prompts}) == 1


def test_same_seed_same_prompts():
    assert make_prompts(24, 512, seed=1) == make_prompts(24, 512, seed=1)
    assert make_prompts(24, 512, seed=1) != make_prompts(24, 512, seed=2)
    prompts = make_prompts(24, 512, seed=1)
    assert len(set(request_seeds(prompts, seed=3))) == 24


def test_packings_hold_every_sequence_once():
    lengths = [300, 1, 64, 64, 900, 3, 200]
    packs = packings(lengths, tokens=400, seed=1)
    assert sorted(i for pack in packs for i in pack) == list(range(7))
    assert all(sum(lengths[i] for i in pack) <= 400 or len(pack) == 1 for pack in packs)
    assert packs != packings(lengths, tokens=400, seed=2)
    assert [i for pack in packs for i in pack] != list(range(7))


def every_setting(plan: Plan):
    return [s for run in plan.engines for s in (*run.before, *run.after_sync)]


def test_quick_plan_covers_what_it_promises():
    plan = quick_plan()
    settings = every_setting(plan)
    assert plan.prompt_count >= 48
    assert {s.temperature for s in settings} == {1.0, 0.7}
    assert {scoring.recompute for s in settings for scoring in s.scorings} == {True, False}
    assert any(s.one_at_a_time and s.prompts == 8 for s in settings)
    assert any(s.permuted for s in settings)
    assert {e for s in settings for e in s.evidence} == {"cached_tokens", "chunked_prompts", "preemptions", "changed_logprobs"}
    budgets = [r.shape.max_num_batched_tokens for r in plan.engines for s in r.before if "chunked_prompts" in s.evidence]
    assert budgets and all(b % 64 for b in budgets)
    assert all(300 + s.max_tokens <= MAX_MODEL_LEN for s in settings)


def test_full_plan_has_every_pair():
    settings = every_setting(full_plan())
    assert len(settings) > 2 * len(every_setting(quick_plan()))
    assert all({scoring.recompute for scoring in s.scorings} == {True, False} for s in settings)
    shapes = [run.shape for run in full_plan().engines]
    assert any(shape.enable_prefix_caching and shape.max_num_batched_tokens % 64 for shape in shapes), "hits that move the cuts of chunks"
    for run in full_plan().engines:  # every engine at both temperatures, before a sync and after it
        assert {s.temperature for s in run.before} == {s.temperature for s in run.after_sync} == {1.0, 0.7}
        if run.shape.enable_prefix_caching:
            for part in (run.before, run.after_sync):
                assert {"warm", "permuted"} <= {word for s in part if "cached_tokens" in s.evidence for word in s.name.split(", ")}


def test_made_architectures_have_every_kind_of_layer():
    """Each is one that make_checkpoint and both runtimes know; together they have experts, Gated DeltaNet, latent attention and a nested
    checkpoint."""
    from isoexec.contract.architectures import REGIONS
    from isoexec.verify import checkpoint, settings

    assert set(settings.MADE_ARCHITECTURES) <= set(REGIONS) == set(checkpoint.ARCHITECTURES)
    for part in ("Qwen3Moe", "Qwen3_5For", "Qwen3_5Moe", "ForConditionalGeneration", "Glm4MoeLite"):
        assert any(part in name for name in settings.MADE_ARCHITECTURES)
    assert settings.brief_plan().names == quick_plan().names
