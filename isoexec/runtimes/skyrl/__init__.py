"""SkyRL adapter: a DAPO run in which rollout engine and trainer compute the same bits.

``run``: :func:`~isoexec.runtimes.skyrl.run.train`. ``config``: SkyRL's configuration with a section of ours, checked before anything
starts. ``cluster``: Ray. ``experiment``, ``trainer``, ``generator``, ``stream``, ``dapo``: the driver's side, subclasses of SkyRL's.
``registries``: where SkyRL's functions pass between processes. ``actors``: Ray actors that import a framework only where they run; behind
them ``server``, ``executor`` and ``extension`` (vLLM) and ``worker``, ``wrapper``, ``ratio``, ``weights``, ``checkpoint`` (Megatron).
``client``: talks to the engines. ``mismatch``: the comparison of each step. ``resume``, ``aside``: which run a checkpoint is of, and what
becomes of an older run's results. ``steps``, ``lines``: ``steps.jsonl``. ``address``: of a cluster to join.
"""
