"""YAML + included parts + dotted overrides -> Recipe, with every fault reported at once.

    include: [targets/smollm2-135m.yaml, domains/chat.yaml]     # relative to the file, or to the shipped recipes/

Later parts win over earlier ones, the recipe's own keys over its parts, overrides over all.
"""

import copy
import difflib
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from recipes.check import cross_faults
from recipes.schema import Recipe

SHIPPED = Path(__file__).parent
_ADAPTER = TypeAdapter(Recipe)


def load(path: str, overrides: list[str] | None = None) -> Recipe:
    """The recipe at `path` (a file, or a shipped recipe's name) under `key=value` overrides.

    Raises ValueError with one line per fault: key, value, what is allowed, nearest known key.
    """
    return build(raw(path, overrides))


def raw(path: str, overrides: list[str] | None = None) -> dict[str, Any]:
    """The merged, resolved but unchecked recipe, as plain data."""
    merged = _read(_find(path))
    for item in overrides or []:
        key, sep, _ = item.partition("=")
        if not sep or not key.strip():
            raise ValueError(f"override {item!r}: not of the form key=value, e.g. train.lr=0.001")
    try:
        config = OmegaConf.merge(OmegaConf.create(merged), OmegaConf.from_dotlist(overrides or []))
        plain = OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, TypeError) as error:
        given = f" (with {', '.join(overrides)})" if overrides else ""
        alone = any(part.isdigit() for item in overrides or [] for part in item.partition("=")[0].split("."))
        hint = "; a list is overridden whole, key=[item, ...], not item by item" if alone else ""
        raise ValueError(f"recipe {path}{given}: {_first_line(error)}{hint}") from error
    assert isinstance(plain, dict)
    return cast(dict[str, Any], plain)


def build(plain: dict[str, Any]) -> Recipe:
    """A checked Recipe from plain data. Raises ValueError that lists all faults."""
    try:
        recipe = _ADAPTER.validate_python(plain)
    except ValidationError as error:
        faults = [_explain(item, plain) for item in error.errors()]
        raise ValueError(_listing(faults + _more_faults(plain, error))) from None
    faults = cross_faults(recipe)
    if faults:
        raise ValueError(_listing(faults))
    return recipe


def plain(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON-ready data; `build(plain(r)) == r`."""
    return _ADAPTER.dump_python(recipe, mode="json")


def shipped() -> list[str]:
    """Names of the recipes that come with the project."""
    return sorted(p.stem for p in SHIPPED.glob("*.yaml"))


def _find(path: str) -> Path:
    for candidate in (Path(path), SHIPPED / path, SHIPPED / f"{path}.yaml"):
        if candidate.is_file():
            return candidate
    near = difflib.get_close_matches(Path(path).stem, shipped(), n=1, cutoff=0.0)
    raise ValueError(f"recipe {path!r} not found; shipped recipes: {', '.join(shipped())}; nearest: {near[0]}")


def _read(file: Path, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    if file.resolve() in chain:
        raise ValueError(f"{file}: includes itself through {' -> '.join(p.name for p in chain)}")
    try:
        own = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not YAML: {_first_line(error)}") from error
    if not isinstance(own, dict):
        raise ValueError(f"{file}: holds {type(own).__name__}, a recipe is a mapping of keys")
    own = cast(dict[str, Any], own)
    includes = own.pop("include", [])
    if not isinstance(includes, list):
        raise ValueError(f"{file}: include: {includes!r} is not a list of files")
    parts: list[dict[str, Any]] = []
    for name in cast(list[Any], includes):
        found = [p for p in (file.parent / str(name), SHIPPED / str(name)) if p.is_file()]
        if not found:
            near = _nearest(name)
            raise ValueError(
                f"{file}: include {name!r} not found beside it or in the shipped recipes; nearest shipped: {near}"
            )
        parts.append(_read(found[0], (*chain, file.resolve())))
    try:
        return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.merge(*parts, own), resolve=False))
    except (OmegaConfBaseException, TypeError) as error:  # e.g. a list here and a mapping in a part
        raise ValueError(f"{file}: does not fit the parts that it includes: {_first_line(error)}") from error


def _explain(item: Any, plain: dict[str, Any]) -> str:
    where = [str(part) for part in item["loc"]]
    key = ".".join(where)
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        near = difflib.get_close_matches(where[-1], _siblings(item["loc"]), n=1, cutoff=0.0)
        return f"{key}: unknown key (value {_short(item['input'])}); nearest known key: {near[0] if near else 'none'}"
    if item["type"] in ("missing", "missing_argument"):
        return f"{key}: missing; a recipe must set it"
    return f"{key}: {_short(item['input'])} is not allowed: {item['msg'][0].lower()}{item['msg'][1:]}"


def _more_faults(plain: dict[str, Any], error: ValidationError) -> list[str]:
    """What the rest breaks once the faulty keys are left to their defaults; nothing where that leaves no recipe."""
    rest = copy.deepcopy(plain)
    for item in error.errors():
        node: Any = rest
        for part in item["loc"][:-1]:
            node = node[part] if isinstance(node, dict) and part in node else None
        if isinstance(node, dict):
            cast(dict[Any, Any], node).pop(item["loc"][-1], None)
    try:
        return cross_faults(_ADAPTER.validate_python(rest))
    except ValidationError:
        return []


def _siblings(loc: tuple[Any, ...]) -> list[str]:
    """Known keys beside the one at `loc`, by walking the schema's own JSON form."""
    root = _ADAPTER.json_schema()
    node: dict[str, Any] = root
    for part in loc[:-1]:
        node = _deref(node, root)
        node = node.get("properties", {}).get(part) or node.get("additionalProperties") or node.get("items") or {}
    return list(_deref(node, root).get("properties", {}))


def _deref(node: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in node:
        node = root["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return node


def _nearest(name: Any) -> str:
    """The shipped file whose name an include may have meant."""
    files = [file.relative_to(SHIPPED).as_posix() for file in sorted(SHIPPED.rglob("*.yaml"))]
    return difflib.get_close_matches(str(name), files, n=1, cutoff=0.0)[0]


def _listing(faults: list[str]) -> str:
    return f"the recipe has {len(faults)} fault{'s' * (len(faults) > 1)}:\n" + "\n".join(f"  {f}" for f in faults)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
