"""The manifests of cluster/kuberay: what the API server would refuse, and what it would take but could not work."""

import copy
import json
import lzma
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from kustomize import Manifest, render

from lwray.cluster.job import STOP_WAIT
from lwray.config.load import load

ROOT = Path(__file__).parents[1]
KUBERAY = ROOT / "cluster/kuberay"
SCHEMAS = Path(__file__).parent / "data/kuberay-v1.json.xz"
DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
SPOT = sorted(path.name for path in KUBERAY.glob("components/spot-*"))
OWN_OVERLAYS = {**{name: [name] for name in SPOT}, "everything": ["bucket", "gpu-8", "spot-gke", "standing"]}
"""What a user may compose besides the overlays that are there: an overlay's name, its components."""
ALWAYS_TAINTED = {"kubernetes.azure.com/scalesetpriority"}
"""Labels of spot nodes that their cloud taints too: what does not tolerate it is elsewhere."""
LAYERS = ["base", *(f"overlays/{path.name}" for path in sorted(KUBERAY.glob("overlays/*")))]
LAYERS += [f"overlays/{name}" for name in OWN_OVERLAYS]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cluster/kuberay with the user's overlays in it."""
    directory = tmp_path_factory.mktemp("kuberay") / "kuberay"
    shutil.copytree(KUBERAY, directory)
    for name, components in OWN_OVERLAYS.items():
        overlay = {"resources": ["../../base"], "components": [f"../../components/{part}" for part in components]}
        kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
        (directory / "overlays" / name).mkdir()
        (directory / "overlays" / name / "kustomization.yaml").write_text(yaml.safe_dump(kind | overlay))
    return directory


@pytest.fixture(params=LAYERS)
def manifests(copied: Path, request: pytest.FixtureRequest) -> list[Manifest]:
    return render(copied / request.param)


@pytest.fixture(scope="module", name="validate")
def validate_manifests() -> Callable[[Manifest], None]:
    """Raises jsonschema.ValidationError for an object that the API server would refuse."""
    validators = {
        # without a check of the schema itself at each use, which takes longer than all the rest
        kind: jsonschema.Draft202012Validator(closed(schema))
        for kind, schema in json.loads(lzma.decompress(SCHEMAS.read_bytes())).items()
    }
    return lambda manifest: validators[manifest["kind"]].validate(manifest)


def closed(schema: Any) -> Any:
    """A structural schema that refuses unknown fields, as `kubectl apply` does by default."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    open_ended = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not open_ended:
        result["additionalProperties"] = False
    return result


def of_ray(manifests: list[Manifest]) -> Manifest:
    [found] = [manifest for manifest in manifests if manifest["apiVersion"] == "ray.io/v1"]
    return found


def cluster_of(manifests: list[Manifest]) -> dict[str, Any]:
    spec: dict[str, Any] = of_ray(manifests)["spec"]
    return spec.get("rayClusterSpec", spec)


def groups(manifests: list[Manifest]) -> list[dict[str, Any]]:
    """The head's group and the workers'."""
    cluster = cluster_of(manifests)
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: dict[str, Any]) -> dict[str, Any]:
    [only] = group["template"]["spec"]["containers"]
    return dict(only)


def variables(group: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container(group)["env"]}


def every(key: str, node: Any) -> Iterator[Any]:
    """Each value of `key`, however deep."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key:
                yield value
            yield from every(key, value)
    elif isinstance(node, list):
        for item in node:
            yield from every(key, item)


def bytes_of(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)?", quantity).groups()  # type: ignore[union-attr]
    return int(number) * 1024 ** ("KMGT".index(unit[0]) + 1 if unit else 0)


def test_kubectl_renders_the_same(copied: Path, manifests: list[Manifest], request: pytest.FixtureRequest) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip(
            "no kubectl here, and Debian's (1.20) knows no components; the other tests render with tests/kustomize.py"
        )
    layer = copied / request.node.callspec.params["manifests"]
    result = subprocess.run([kubectl, "kustomize", layer], capture_output=True, text=True, check=True, timeout=30)
    rendered = list(yaml.safe_load_all(result.stdout))
    assert sorted(rendered, key=lambda m: str(m["kind"])) == sorted(manifests, key=lambda m: str(m["kind"]))


def test_the_published_schemas_take_every_manifest(
    manifests: list[Manifest], validate: Callable[[Manifest], None]
) -> None:
    validate(of_ray(manifests))
    assert {manifest["kind"] for manifest in manifests} <= {"RayJob", "RayCluster", "PersistentVolumeClaim"}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0, "minReplica"), 1),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0, "volumeMount"), []),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "tokens"),
        (("spec", "backoffLimit"), "10"),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, tuple) else "",
)
def test_the_schemas_refuse_a_slip_of_the_pen(
    where: tuple[Any, ...], value: Any, validate: Callable[[Manifest], None]
) -> None:
    manifest = copy.deepcopy(of_ray(render(KUBERAY / "base")))
    place: Any = manifest
    for part in where[:-1]:
        place = place[part]
    place[where[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(manifest)


def test_the_command_trains_the_run_of_the_jobs_own_name(manifests: list[Manifest]) -> None:
    manifest = of_ray(manifests)
    # limits of KubeRay's operator, which the schema does not state
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", manifest["metadata"]["name"])
    if manifest["kind"] == "RayJob":
        python, dash_m, program, command, config, *overrides = shlex.split(manifest["spec"]["entrypoint"])
        assert (python, dash_m, program, command) == ("python", "-m", "lwray", "train")
        assert load(ROOT / config, overrides).config.run.name == manifest["metadata"]["name"]
        assert config.startswith("configs/"), "the image holds no other configurations"


def test_a_failed_job_is_tried_again_and_a_finished_one_leaves_no_cluster(manifests: list[Manifest]) -> None:
    manifest = of_ray(manifests)
    if manifest["kind"] == "RayJob":
        assert manifest["spec"]["backoffLimit"] > 0
        assert manifest["spec"]["shutdownAfterJobFinishes"] is True


def test_each_wait_fits_into_the_one_around_it(manifests: list[Manifest]) -> None:
    """The commit into the stop wait, that into the drain of the head, a drain into the pod's grace with a margin."""
    for group in groups(manifests):
        grace = group["template"]["spec"]["terminationGracePeriodSeconds"]
        assert 0 < int(variables(group)[DRAIN]) <= grace - max(3, grace * 0.1)
    manifest = of_ray(manifests)
    if manifest["kind"] == "RayJob":
        wait = yaml.safe_load(manifest["spec"]["runtimeEnvYAML"])["env_vars"][STOP_WAIT]
        assert isinstance(wait, str), "Ray takes only strings as env_vars"
        assert 3 < int(wait) < int(variables(groups(manifests)[0])[DRAIN])


@pytest.mark.parametrize("component", SPOT)
def test_workers_are_on_spot_nodes_and_the_head_is_not(copied: Path, component: str) -> None:
    head, *workers = [group["template"]["spec"] for group in groups(render(copied / "overlays" / component))]
    terms = [term for expressions in every("matchExpressions", head) for term in expressions]
    avoided = {term["key"] for term in terms if term["operator"] == "DoesNotExist"}
    assert head["tolerations"] == []
    for worker in workers:
        [(label, value)] = worker["nodeSelector"].items()
        elsewhere = head["nodeSelector"].get(label, value) != value
        assert elsewhere or label in avoided or label in ALWAYS_TAINTED


def test_one_image_with_a_fixed_tag_runs_everywhere(manifests: list[Manifest]) -> None:
    [image] = set(every("image", manifests))
    assert re.search(r":(?!latest$)[\w.-]+$", image)
    user = re.search(r"^USER (\d+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert user is not None
    for group in groups(manifests):
        context = group["template"]["spec"]["securityContext"]
        assert context["runAsUser"] == context["fsGroup"] == int(user[1])


def test_the_version_is_the_installed_rays_and_a_token_is_asked_for(manifests: list[Manifest]) -> None:
    cluster = cluster_of(manifests)
    assert cluster["rayVersion"] == ray.__version__
    assert cluster["authOptions"] == {"mode": "token"}


def test_no_secret_stands_in_a_manifest(manifests: list[Manifest]) -> None:
    for variable in (item for items in every("env", manifests) for item in items):
        assert not re.search("KEY|TOKEN|SECRET|PASSWORD", variable["name"]) or "value" not in variable


def test_ports_are_where_kuberay_and_prometheus_look(manifests: list[Manifest]) -> None:
    head, *workers = groups(manifests)
    ports = {port["name"]: port["containerPort"] for port in container(head)["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "metrics": 8080}
    for group in (head, *workers):
        annotations = group["template"]["metadata"]["annotations"]
        [scraped] = [port["containerPort"] for port in container(group)["ports"] if port["name"] == "metrics"]
        assert annotations["prometheus.io/scrape"] == "true"
        assert annotations["prometheus.io/port"] == str(scraped)


def test_every_node_has_the_storage(manifests: list[Manifest]) -> None:
    claims = {m["metadata"]["name"] for m in manifests if m["kind"] == "PersistentVolumeClaim"}
    assert len({variables(group)["LWRAY_STORAGE"] for group in groups(manifests)}) == 1
    for group in groups(manifests):
        mounts = {mount["mountPath"]: mount["name"] for mount in container(group)["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in group["template"]["spec"]["volumes"]}
        storage = variables(group)["LWRAY_STORAGE"]
        assert set(mounts.values()) == set(volumes)
        if "://" in storage:
            assert container(group)["envFrom"] == [{"secretRef": {"name": "lwray-bucket"}}]
            assert not claims
        else:
            assert volumes[mounts[storage]]["persistentVolumeClaim"]["claimName"] in claims


def test_shared_memory_holds_rays_store_and_fits_into_the_pod(manifests: list[Manifest]) -> None:
    for group in groups(manifests):
        mounts = {mount["mountPath"]: mount["name"] for mount in container(group)["volumeMounts"]}
        [volume] = [v for v in group["template"]["spec"]["volumes"] if v["name"] == mounts["/dev/shm"]]
        assert volume["emptyDir"]["medium"] == "Memory"
        store = int(group["rayStartParams"]["object-store-memory"])
        size, memory = (
            bytes_of(q) for q in (volume["emptyDir"]["sizeLimit"], container(group)["resources"]["limits"]["memory"])
        )
        assert store < size < memory
        assert container(group)["resources"]["requests"]["memory"] == container(group)["resources"]["limits"]["memory"]


def test_the_head_takes_no_workers_and_the_groups_scale_within_bounds(manifests: list[Manifest]) -> None:
    head, *workers = groups(manifests)
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert cluster_of(manifests)["enableInTreeAutoscaling"] is True
    for group in workers:
        assert 0 < group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_a_standing_cluster_is_the_jobs_own(copied: Path) -> None:
    standing = of_ray(render(copied / "overlays/standing"))
    assert standing["kind"] == "RayCluster"
    assert standing["spec"] == of_ray(render(copied / "base"))["spec"]["rayClusterSpec"]
