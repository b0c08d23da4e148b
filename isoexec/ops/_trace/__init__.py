"""The microscope: digests of what each op reads and writes, one per token, recorded while a runtime runs.

``digest``: the digest of a row. ``stages``: how each op's token rows, weights, positions and states are found. ``context``: what an op that
looks back has seen of a token's past. ``recorder``: the observer that a runtime installs. ``captured``: a pass that a CUDA graph holds.
"""
