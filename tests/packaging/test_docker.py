# SPDX-License-Identifier: Apache-2.0
"""The images' recipes and the compose file: linted, parsed, and their scripts run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from patience import patience

pytest.importorskip("compose_spec")
pytest.importorskip("dockerfile_parse")

from compose_spec import PyCompose
from dockerfile_parse import DockerfileParser

from vllm_slo.config.model import SLOConfig
from vllm_slo.engine.compat.version import NEWEST, OLDEST, release_of

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
IMAGES = ["Dockerfile", "Dockerfile.cpu"]
PINNED = re.compile(r"[a-z/-]+:v?\d+\.\d+\.\d+[a-z.-]*(\$\{[A-Z]+_DIGEST\})?( AS [a-z]+)?")

each_image = pytest.mark.parametrize("image", IMAGES)


def instructions(image: str) -> list[tuple[str, str]]:
    """(instruction, value) in order."""
    text = BytesIO((DOCKER / image).read_bytes())
    found = DockerfileParser(fileobj=text, env_replace=False).structure
    return [(one["instruction"], one["value"]) for one in found if one["instruction"] != "COMMENT"]


def values(image: str, name: str) -> list[str]:
    return [value for instruction, value in instructions(image) if instruction == name]


# --- recipes -------------------------------------------------------------------------------------


@each_image
def test_hadolint_has_nothing_to_say(image: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, DOCKER / image], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@each_image
def test_what_it_builds_on_is_pinned(image: str) -> None:
    bases = values(image, "FROM")
    assert len(bases) == 2  # the wheel is built in a stage of its own
    for base in bases:
        assert PINNED.fullmatch(base), base
    digests = {name for base in bases for name in re.findall(r"\$\{([A-Z]+_DIGEST)\}", base)}
    assert {f"{name}=" for name in digests} <= set(values(image, "ARG"))


def test_the_bases_are_what_the_project_supports() -> None:
    (vllm,) = (base for base in values("Dockerfile", "FROM") if base.startswith("vllm/"))
    version = re.match(r"vllm/vllm-openai:v([\d.]+)\$", vllm)
    assert version is not None
    assert OLDEST <= (release_of(version[1]) or ()) <= NEWEST
    assert f"\nvllm=={version[1]}\n" in (DOCKER / "constraints-cuda.txt").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least, below = re.findall(r"3\.(\d+)", project["requires-python"])
    pythons = {base for image in IMAGES for base in values(image, "FROM") if "python" in base}
    assert len({base.partition(" ")[0] for base in pythons}) == 1
    for base in pythons:
        minor = re.match(r"python:3\.(\d+)\.\d+-slim", base)
        assert minor and int(least) <= int(minor[1]) < int(below)


@each_image
def test_how_it_runs(image: str) -> None:
    assert values(image, "USER")[-1] == "2000:0"
    assert json.loads(values(image, "ENTRYPOINT")[-1]) == ["tini", "--", "vllm-slo", "serve"]
    assert json.loads(values(image, "CMD")[-1]) == ["--help"]  # a model and flags take its place
    (health,) = values(image, "HEALTHCHECK")
    check = json.loads(health.partition("CMD ")[2])
    copied = [value.split() for value in values(image, "COPY")]
    assert any("docker/health.py" in words and check[1].startswith(words[-1]) for words in copied)
    script = (DOCKER / "make_user.sh").read_text()
    assert "USER_ID=2000\n" in script and "HOME_FOLDER=/home/vllm\n" in script
    writable = re.search(r"for folder in (.*); do", script)
    assert writable is not None
    folders = {f"/home/vllm/{name}" for name in writable[1].split()}
    (environment,) = values(image, "ENV")
    caches = dict(word.split("=") for word in environment.split())
    assert caches.pop("HOME") == "/home/vllm"
    assert caches.pop("NUMBA_CPU_NAME") == "generic"
    assert set(caches) == {"HF_HOME", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME"}
    assert set(caches.values()) <= folders
    assert f"{caches['XDG_CACHE_HOME']}/vllm-slo" in folders  # profiles


@each_image
def test_what_it_copies_is_in_the_context(image: str) -> None:
    kept = [
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for value in values(image, "COPY"):
        if value.startswith("--from="):
            continue
        for source in value.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(name.split("/*")[0] == source for name in kept), source


def test_both_images_are_alike_but_for_what_vllm_needs() -> None:
    alike = ("COPY", "ENV", "WORKDIR", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD")
    cuda, cpu = ([one for one in instructions(i) if one[0] in alike] for i in IMAGES)
    assert cuda == cpu


def test_what_python_compiles_is_in_the_cpu_image() -> None:
    """The image's user cannot write bytecode. pip compiles by itself, uv only if told to."""
    (install,) = (value for value in values("Dockerfile.cpu", "RUN") if "install.sh" in value)
    assert install.startswith("UV_COMPILE_BYTECODE=1 /opt/vllm-slo/install.sh cpu ")


@each_image
def test_the_policies_are_compiled_in_the_image_for_any_processor(image: str) -> None:
    """`tests/core/test_kept_code.py` tries that a server takes this code and compiles nothing."""
    (install,) = (value for value in values(image, "RUN") if "install.sh" in value)
    steps = [step.strip() for step in install.split("&&")]
    compiling = [step for step in steps if "compile_package" in step]
    assert compiling == [steps[1]]  # after the installation, as the user who can write there
    environment, code = re.fullmatch(r'(\S+) python3 -c\s+"(.+)"', compiling[0]).groups()  # type: ignore[union-attr]
    assert environment == "NUMBA_CPU_NAME=generic"
    assert code == "from vllm_slo.core.jit import compile_package; compile_package('vllm_slo.core')"


# --- scripts -------------------------------------------------------------------------------------


@contextmanager
def answering(status: int) -> Iterator[str]:
    """A server whose /health answers with this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/health"
        server.shutdown()


def health(url: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DOCKER / "health.py"],
        env={**os.environ, "VLLMSLO_HEALTH_URL": url, **more},
        capture_output=True,
        text=True,
        timeout=patience(30),
        check=False,
    )


def test_the_health_check() -> None:
    with answering(200) as url:
        done = health(url)
        assert (done.returncode, done.stderr) == (0, "")
        done = health(url, http_proxy="http://127.0.0.1:9")  # where nobody listens
        assert (done.returncode, done.stderr) == (0, "")
    assert health(url).returncode == 1  # it has gone
    with answering(503) as url:
        done = health(url)
        assert done.returncode == 1
        assert "503" in done.stderr
    assert health("http//nonsense").returncode == 1


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["cpu"],
        ["rocm", "a.whl"],
        ["cpu", "nowhere.whl"],
        ["cuda", "nowhere.whl", "x"],
        ["beside", "nowhere.whl"],
        ["cpu", "."],
    ],
)
def test_the_installer_refuses_what_it_cannot_do(words: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [DOCKER / "install.sh", *words],
        env={**os.environ, "PYTHON": "/nowhere/python"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2
    if len(words) > 1 and words[0] in ("cpu", "cuda", "beside"):
        assert f"install.sh: {words[1]}: no such wheel, and no folder of a clone" in done.stderr
    else:
        assert "install.sh cpu SOURCE" in done.stderr


# --- compose -------------------------------------------------------------------------------------

COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def test_compose_keeps_its_specification() -> None:
    PyCompose.from_json(json.dumps(COMPOSE)).validate()
    broken = {**COMPOSE, "services": {"a": {"image": "a", "helthcheck": {}}}}
    with pytest.raises(ValueError, match="helthcheck"):
        PyCompose.from_json(json.dumps(broken))


def test_nothing_is_published_beyond_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert len(ports) == 4
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)


def test_images_are_built_here_or_pinned() -> None:
    for name, service in SERVICES.items():
        if "build" in service:
            build = service["build"]
            assert (DOCKER / build["context"] / build["dockerfile"]).is_file(), name
        else:
            assert PINNED.fullmatch(service["image"]), name


def test_every_service_has_a_profile_a_health_check_and_few_rights() -> None:
    for name, service in SERVICES.items():
        assert set(service["profiles"]) <= {"cpu", "cuda"}
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        # A server's check is in its image.
        assert ("healthcheck" in service) is ("build" not in service), name


def test_no_password_is_written_down() -> None:
    asked = SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"]
    assert asked.startswith("${GRAFANA_PASSWORD:?")
    settings = dict(
        line.split("=")
        for line in (DOCKER / "env.example").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert settings["GRAFANA_PASSWORD"] == "" == settings["VLLM_API_KEY"]
    text = (DOCKER / "compose.yaml").read_text()
    assert set(re.findall(r"\$\{(\w+)", text)) == set(settings)


def test_the_grace_is_longer_than_what_running_requests_get() -> None:
    for name in ("cpu", "cuda"):
        drain_s = re.search(r"--shutdown-timeout (\d+)", SERVICES[name]["command"])
        assert drain_s is not None
        assert int(SERVICES[name]["stop_grace_period"].removesuffix("s")) >= int(drain_s[1]) + 10


def test_what_is_mounted_exists() -> None:
    mounts = [mount for service in SERVICES.values() for mount in service["volumes"]]
    named = [mount.split(":") for mount in mounts if not mount.startswith(".")]
    assert {source for source, *_ in named} == set(COMPOSE["volumes"])
    files = {mount.split(":")[0] for mount in mounts if mount.startswith(".")}
    assert files == {
        *("../examples/slo.yaml", "./prometheus", "./grafana/provisioning", "./grafana/dashboards")
    }
    assert all(mount.endswith(":ro") for mount in mounts if mount.startswith("."))
    SLOConfig.load(DOCKER / "../examples/slo.yaml")


def test_prometheus_finds_the_server_and_grafana_its_dashboards() -> None:
    scraped = DOCKER / "prometheus/prometheus.yml"
    config = yaml.safe_load(scraped.read_text())
    targets = [
        target
        for job in config["scrape_configs"]
        for group in job.get("static_configs", ())
        for target in group["targets"]
    ]
    for name in ("cpu", "cuda"):
        (alias,) = SERVICES[name]["networks"]["default"]["aliases"]
        assert f"{alias}:8000" in targets
    for rules in config.get("rule_files", ()):
        assert (DOCKER / "prometheus" / Path(rules).name).is_file()
    (provider,) = (DOCKER / "grafana/provisioning/dashboards").glob("*.y*ml")
    paths = [one["options"]["path"] for one in yaml.safe_load(provider.read_text())["providers"]]
    assert paths == ["/var/lib/grafana/dashboards"]
