"""Which floating-point ops on the logprob path no isoexec op issued: there must be none. docs/audit.md says what counts.

``rules``: what an op does to floating-point numbers. ``recorder``: watches a process while its runtime computes logprobs. ``launches``:
kernels that no dispatcher sees. ``engine_worker``, ``trainer_worker``: the two sides. ``run``, ``report``: ``isoexec audit``.
"""
