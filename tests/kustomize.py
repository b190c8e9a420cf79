"""The part of kustomize that cluster/kuberay uses, so that its manifests are tested where kustomize is not installed.

Whatever else a kustomization.yaml asks for is refused, so that nothing is left out in silence. Where kubectl is
installed, a test compares with the real one.
"""

import copy
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]

UNDERSTOOD = {"apiVersion", "kind", "resources", "components", "patches", "replacements", "images"}


def render(directory: Path) -> list[Manifest]:
    """What `kubectl kustomize directory` prints, as objects. Raises ValueError for what is not understood here."""
    return build(directory, [])


def build(directory: Path, given: list[Manifest]) -> list[Manifest]:
    """A kustomization without, or a component with, the objects of its parent."""
    layer = yaml.safe_load((directory / "kustomization.yaml").read_text())
    if unknown := set(layer) - UNDERSTOOD:
        raise ValueError(f"{directory} uses {sorted(unknown)}")
    manifests = list(given)
    for name in layer.get("resources", []):
        path = directory / name
        manifests += build(path, []) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))
    for name in layer.get("components", []):
        manifests = build(directory / name, manifests)
    for patch in layer.get("patches", []):
        manifests = patched(manifests, patch["target"], yaml.safe_load(patch["patch"]))
    for replacement in layer.get("replacements", []):
        replace_fields(manifests, replacement)
    for image in layer.get("images", []):
        rename_images(manifests, image)
    return manifests


def patched(manifests: list[Manifest], target: dict[str, str], patch: Any) -> list[Manifest]:
    """The objects after a JSON patch (RFC 6902), or without those that `$patch: delete` names."""
    chosen = [manifest for manifest in manifests if selects(target, manifest)]
    if not chosen:
        raise ValueError(f"nothing is {target}")
    if isinstance(patch, dict):
        if patch.get("$patch") != "delete":
            raise ValueError("of strategic merge patches only `$patch: delete` is understood")
        return [manifest for manifest in manifests if manifest not in chosen]
    for manifest in chosen:
        for operation in patch:
            apply_operation(manifest, operation)
    return manifests


def selects(selector: dict[str, str], manifest: Manifest) -> bool:
    if set(selector) - {"kind", "name"}:
        raise ValueError(f"{selector} is not understood")
    name = manifest["metadata"]["name"]
    return selector.get("kind", manifest["kind"]) == manifest["kind"] and selector.get("name", name) == name


def apply_operation(manifest: Manifest, operation: dict[str, Any]) -> None:
    """One operation of a JSON patch, in place. Raises ValueError where its path is not there or its test fails."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place: Any = manifest
    for part in parents:
        place = place[int(part)] if isinstance(place, list) else place[part]
    key: Any = int(last) if isinstance(place, list) and last != "-" else last
    action, value = operation["op"], copy.deepcopy(operation.get("value"))
    exists = key < len(place) if isinstance(key, int) else key in place
    if action == "add" and key == "-":
        place.append(value)
    elif action == "add" and isinstance(place, dict):
        place[key] = value
    elif not exists or action not in ("replace", "remove", "test"):
        raise ValueError(f"cannot {action} {operation['path']}")
    elif action == "replace":
        place[key] = value
    elif action == "remove":
        del place[key]
    elif place[key] != value:
        raise ValueError(f"{operation['path']} is {place[key]!r}, not {value!r}")


def replace_fields(manifests: list[Manifest], replacement: dict[str, Any]) -> None:
    """Copy one field of one object to fields of others, in place."""
    [source] = [m for m in manifests if selects({"kind": replacement["source"]["kind"]}, m)]
    value: Any = source
    for part in replacement["source"]["fieldPath"].split("."):
        value = value[part]
    for target in replacement["targets"]:
        for manifest in manifests:
            if selects(target["select"], manifest):
                for field in target["fieldPaths"]:
                    apply_operation(manifest, {"op": "replace", "path": "/" + field.replace(".", "/"), "value": value})


def rename_images(node: Any, image: dict[str, str]) -> None:
    """In every `containers` list, however deep, as kustomize does."""
    if isinstance(node, list):
        for item in node:
            rename_images(item, image)
    elif isinstance(node, dict):
        for container in node.get("containers", []):
            name, _, tag = (
                container["image"].rpartition(":") if ":" in container["image"] else (container["image"], "", "")
            )
            if name == image["name"]:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
        for item in node.values():
            rename_images(item, image)
