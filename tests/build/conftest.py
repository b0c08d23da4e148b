"""The miniature repository as fixtures."""

from __future__ import annotations

import pytest

from house import House


@pytest.fixture
def empty_house(tmp_path) -> House:
    return House(tmp_path / "house")


@pytest.fixture(scope="session")
def built_house(tmp_path_factory) -> House:
    built = House(tmp_path_factory.mktemp("template") / "house")
    built.build()
    built.commit("Add one", "return x + 1\n", "return x + 100\n")
    built.commit("Add two", "return x + 8\n", "return x + 800\n")
    built.tool("patches", "export", "skyrl")
    return built


@pytest.fixture
def house(built_house, tmp_path) -> House:
    """Built, with two patches for skyrl: add-one.patch and add-two.patch."""
    return built_house.copy_to(tmp_path / "house")
