"""Bundles of tiny random models, each built once a session."""

import pathlib
from collections.abc import Callable

import pytest
import tiny_models

from specexport.exporter.config import BuildConfig
from specexport.exporter.pipeline import build

MakeBundle = Callable[..., pathlib.Path]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeBundle:
    """``tiny_model(arch, seed=0, **overrides)``: directory of a saved tiny model."""
    made: dict[str, pathlib.Path] = {}

    def make(arch: str, seed: int = 0, **overrides: object) -> pathlib.Path:
        key = f"{arch}-{seed}-{sorted(overrides.items())}"
        if key not in made:
            made[key] = tiny_models.save(arch, tmp_path_factory.mktemp(arch), seed=seed, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory, tiny_model: MakeBundle) -> MakeBundle:
    """``tiny_bundle(arch, **build_options)``: a finished bundle of that model."""
    made: dict[str, pathlib.Path] = {}

    def make(arch: str, **options: object) -> pathlib.Path:
        key = f"{arch}-{sorted(options.items())}"
        if key not in made:
            output = tmp_path_factory.mktemp("bundle") / arch
            options = {"compare_tokens": 256, "fail_if": ("kl_mean>0.5",), **options}
            build(BuildConfig(model=str(tiny_model(arch)), output=output, **options))
            made[key] = output
        return made[key]

    return make
