"""vLLM adapter: what patched vLLM calls, and the in-process rollout engine.

``step``: which case a step executes. ``settings``: what a contract refuses. ``attention``, ``embedding``, ``sampler``: vLLM's objects
to ops. ``qwen3``: an architecture's forward pass. ``engine``: :class:`~isoexec.runtimes.vllm.engine.RolloutEngine`.
"""
