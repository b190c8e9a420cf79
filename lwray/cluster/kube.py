"""`lwray submit --to kube`: KubeRay's RayJob of cluster/kuberay with this run's command, for `kubectl apply`."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from lwray.cluster.submit import AT_THE_ROOT, Wanted, as_yaml, free_number, run_program, train_command
from lwray.errors import UserError

PLACEHOLDER = "lwray"
"""The image of the manifest until an overlay or --image names one."""
LONGEST = 47
"""Characters of a RayJob's name: KubeRay makes longer names of it."""
ENDED = ("Complete", "Failed")
KUBECTL_IS = "https://kubernetes.io/docs/tasks/tools has it"

Manifest = dict[str, Any]


def to_kube(wanted: Wanted, manifest: Path, image: str | None, *, send: bool, show: Callable[[str], None]) -> str:
    """Show the RayJob, and with `send` apply it; returns its name. Raises UserError before anything is applied."""
    run = wanted.load().config.run.name
    documents = read_manifest(manifest)
    number = free_number(None, numbers(run)) if send else 1
    name = f"{stem(run)}-{number}"
    [job] = [document for document in documents if document["kind"] == "RayJob"]
    fill_in(job, name, train_command(wanted, Path.cwd(), f"run.name={run}"), image)
    text = as_yaml(*documents)
    show(text)
    if send:
        check_image(job, manifest)
        run_program(["kubectl", "apply", "-f", "-"], KUBECTL_IS, text)
    return name


def read_manifest(path: Path) -> list[Manifest]:
    """The objects of a file, or of a directory that kustomize renders. Raises UserError where not one is a RayJob."""
    if path.is_dir():
        text = run_program(["kubectl", "kustomize", str(path)], KUBECTL_IS)
    elif path.exists():
        text = path.read_text(encoding="utf-8")
    else:
        raise UserError(
            f"There is no {path} here. {AT_THE_ROOT} a RayJob, or a directory for kustomize, by --manifest."
        )
    documents = [document for document in yaml.safe_load_all(text) if document]
    if [document.get("kind") for document in documents].count("RayJob") != 1:
        raise UserError(f"{path} must hold one RayJob. To a cluster that stands, submit with --to ray.")
    return documents


def fill_in(job: Manifest, name: str, entrypoint: str, image: str | None) -> None:
    """This run's name and command, in place; `image` where head and workers have the placeholder."""
    job["metadata"]["name"] = name
    job["spec"] |= {"entrypoint": entrypoint, "jobId": name}
    for container in containers(job):
        if image and container["image"] == PLACEHOLDER:
            container["image"] = image


def containers(job: Manifest) -> list[Manifest]:
    """Of head and workers."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def check_image(job: Manifest, path: Path) -> None:
    """Raises UserError where nobody has said which image the pods run."""
    if any(container["image"] == PLACEHOLDER for container in containers(job)):
        raise UserError(f"{path} does not say which image the pods run: give --image REGISTRY/lwray:TAG.")


def numbers(run: str) -> Mapping[int, str]:
    """The numbers that RayJobs of a run have in this namespace. Raises UserError where one has not ended."""
    found = {}
    for item in json.loads(run_program(["kubectl", "get", "rayjobs", "-o", "json"], KUBECTL_IS))["items"]:
        name = item["metadata"]["name"]
        if match := re.fullmatch(rf"{re.escape(stem(run))}-(\d+)", name):
            found[int(match[1])] = name
            if item.get("status", {}).get("jobDeploymentStatus") not in ENDED:
                raise UserError(
                    f"The RayJob {name} of the run {run} has not ended. Delete it: kubectl delete rayjob {name}"
                )
    return found


def stem(run: str) -> str:
    """A run's name as Kubernetes takes it, with room for a number."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[: LONGEST - 6].rstrip("-")
