"""Find the first different bit: record both runtimes, align them by sequence and position, name what differs first and why.

``bundle``, ``compare``, ``causes``, ``report``, ``page`` and ``command`` need the standard library only, so that a bundle is read on any
machine. ``worker`` records in a runtime's process; ``run`` drives two of them, ``session`` for the command line, ``mismatch`` for verify.
"""
