"""The stub of the extension module says what the module has: names, kinds and parameters."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import stagewire
from stagewire import _native

STUB = Path(stagewire.__file__).with_name("_native.pyi")


def declared(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def public(names: Any) -> set[str]:
    special = {"__new__", "__dlpack__", "__dlpack_device__", "__version__"}
    return {name for name in names if not name.startswith("_") or name in special}


def parameters(node: ast.FunctionDef) -> list[tuple[str, str, bool]]:
    """Name, kind and whether there is a default, without self and cls."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [False] * (len(plain) - len(arguments.defaults)) + [True] * len(arguments.defaults)
    found = [(a.arg, "plain", d) for a, d in zip(plain, defaults, strict=True) if a.arg not in {"self", "cls"}]
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return found + [(a.arg, "named", d is not None) for a, d in named]


def real_parameters(function: Any) -> list[tuple[str, str, bool]]:
    named = inspect.Parameter.KEYWORD_ONLY
    return [
        (p.name, "named" if p.kind is named else "plain", p.default is not inspect.Parameter.empty)
        for p in inspect.signature(function).parameters.values()
        if p.name not in {"self", "cls"}
    ]


def test_the_stub_has_the_modules_names() -> None:
    names = declared(ast.parse(STUB.read_text()).body)
    assert public(names) == public(vars(_native))


def test_the_stub_has_the_classes_members() -> None:
    for name, node in declared(ast.parse(STUB.read_text()).body).items():
        if not isinstance(node, ast.ClassDef):
            continue
        members = declared(node.body)
        kind = getattr(_native, name)
        real = public(vars(kind))
        assert public(members) - {"__new__"} == real - {"__new__"}, name
        assert ("__new__" in members) == ("__new__" in vars(kind)), f"{name} can be constructed, or not"
        for member, declaration in members.items():
            assert isinstance(declaration, ast.FunctionDef)
            marks = {mark.id for mark in declaration.decorator_list if isinstance(mark, ast.Name)}
            found = inspect.getattr_static(kind, member)
            where = f"{name}.{member}"
            assert ("property" in marks) == inspect.isgetsetdescriptor(found), where
            assert ("staticmethod" in marks) == isinstance(found, staticmethod), where
            if "property" not in marks:
                signature = kind if member == "__new__" else getattr(kind, member)
                assert parameters(declaration) == real_parameters(signature), where


def test_the_stub_has_the_functions_parameters() -> None:
    for name, node in declared(ast.parse(STUB.read_text()).body).items():
        if isinstance(node, ast.FunctionDef):
            assert parameters(node) == real_parameters(getattr(_native, name)), name


def test_everything_exported_is_documented() -> None:
    import stagewire.aio
    import stagewire.checkpointing
    import stagewire.client
    import stagewire.context
    import stagewire.diffusion
    import stagewire.errors
    import stagewire.kv
    import stagewire.local
    import stagewire.modular
    import stagewire.mooncake
    import stagewire.pipeline

    for module in (
        stagewire,
        stagewire.aio,
        stagewire.checkpointing,
        stagewire.client,
        stagewire.context,
        stagewire.diffusion,
        stagewire.errors,
        stagewire.kv,
        stagewire.local,
        stagewire.modular,
        stagewire.mooncake,
        stagewire.pipeline,
    ):
        assert module.__doc__
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isfunction(value):
                assert value.__doc__, f"{module.__name__}.{name}"
