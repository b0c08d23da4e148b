"""make bundle takes, for each locked package, the file this machine would install."""

from packaging.tags import Tag

import house  # noqa: F401  (puts the tools on the path)
from bundle import choose

ORDER = {Tag("cp312", "cp312", "linux"): 0, Tag("cp312", "abi3", "linux"): 1, Tag("py3", "none", "any"): 2}


def test_the_best_wheel_else_the_source():
    files = ["a-1.0-py3-none-any.whl", "a-1.0-cp312-cp312-linux.whl", "a-1.0.tar.gz", "b-1.0.tar.gz", "b-1.0-cp311-cp311-linux.whl",
             "c_d-1.0-cp312-abi3-linux.whl", "c_d-1.0-cp312.cp311-cp312-win.whl"]
    assert choose(files, ORDER) == {"a": "a-1.0-cp312-cp312-linux.whl", "b": "b-1.0.tar.gz", "c-d": "c_d-1.0-cp312-abi3-linux.whl"}


def test_nothing_for_this_machine_is_not_chosen():
    assert choose(["a-1.0-cp311-cp311-linux.whl", "a-1.0.zip"], ORDER) == {}
