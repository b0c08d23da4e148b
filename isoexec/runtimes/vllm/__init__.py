"""vLLM adapter: what patched vLLM calls, and the in-process rollout engine.

``step``: which case a step executes. ``settings``: what a contract refuses. ``attention``, ``gdn``, ``embedding``, ``sampler``: vLLM's
objects to ops. ``qwen3``, ``qwen3_moe``, ``qwen3_5``, ``glm4_moe_lite``: an architecture's forward pass; ``layers``: what they share.
``engine``: :class:`~isoexec.runtimes.vllm.engine.RolloutEngine`, on as many blocks as ``cache_size`` counts.
"""
