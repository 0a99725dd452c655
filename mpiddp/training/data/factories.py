"""Functions that users bring, named as ``package.module:factory``."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from mpiddp.errors import ConfigurationError, MpiddpError
from mpiddp.options.checks import did_you_mean
from mpiddp.training.data.vision import import_torchvision

T = TypeVar("T")
Factory = Callable[..., Any]


def find_factory(option: str, reference: str) -> Factory:
    """Return what ``package.module:factory`` refers to.

    Raises ConfigurationError if the module cannot be imported, or has no such function.
    """
    module, _, name = reference.partition(":")
    try:
        if module.partition(".")[0] == "torchvision":
            import_torchvision()
        found = import_module(module)
    except MpiddpError:
        raise
    except Exception as error:  # A user's code.
        raise failed(option, f"{module} cannot be imported", error) from error
    factory: Any = getattr(found, name, None)
    if not callable(factory):
        public = [each for each in vars(found) if callable(getattr(found, each))]
        raise ConfigurationError(
            f"{option}: expected a function {name} in {module}, found "
            f"{'none' if factory is None else type(factory).__name__}{did_you_mean(name, public)}"
        )
    chosen: Factory = factory
    return chosen


def call_factory(option: str, factory: Factory, expected: type[T], **offered: object) -> T:
    """Call a factory with those of ``offered`` that it has parameters for, by their names.

    Raises ConfigurationError if it has other parameters without defaults, raises, or returns no
    ``expected``.
    """
    name = describe(factory)
    arguments = _choose_arguments(option, factory, offered)
    try:
        found = factory(**arguments)
    except MpiddpError:
        raise
    except Exception as error:  # A user's code.
        raise failed(option, f"{name} failed", error) from error
    if not isinstance(found, expected):
        raise ConfigurationError(
            f"{option}: expected {name} to return a {expected.__name__}, "
            f"found {type(found).__name__}"
        )
    return found


def describe(factory: Factory) -> str:
    """``package.module:factory``."""
    if isinstance(factory, partial):
        return describe(factory.func)
    name = getattr(factory, "__qualname__", type(factory).__qualname__)
    return f"{getattr(factory, '__module__', '?')}:{name}"


def _choose_arguments(
    option: str, factory: Factory, offered: dict[str, object]
) -> dict[str, object]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # Some that are written in C.
        return {}
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for each in parameters:
        by_name = each.kind is not inspect.Parameter.POSITIONAL_ONLY and each.name in offered
        if each.default is each.empty and each.kind not in variable and not by_name:
            given = " and ".join(offered) or "nothing"
            raise ConfigurationError(
                f"{option}: {describe(factory)} is given {given}, by name; expected a default for "
                f"its parameter {each.name}"
            )
    return {each.name: offered[each.name] for each in parameters if each.name in offered}


def failed(option: str, what: str, error: Exception) -> ConfigurationError:
    """With the place of the user's code that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    # A module that is not there has no place.
    is_known = len(frames) > 1 and not frames[-1].filename.startswith("<frozen ")
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if is_known else ""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return ConfigurationError(f"{option}: {what}: {text}{where}")
