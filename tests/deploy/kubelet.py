"""Runs pods of the chart as local processes, like the kubelet of a node.

Command, variables, files, probes, sleeps before the signal and times of grace are those of the rendered chart. In the
place of a container's root stands a folder, in the place of a pod's address one of loopback, and in the place of its
ports free ones; of what the image brings, its variables and its command.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.harness.compose import ROOT
from benchmarks.harness.service_process import fetch
from benchmarks.harness.topology import program
from tests.deploy.chart import Manifest, environment_of
from tests.waiting import PATIENCE_S, POLL_EVERY_S, wait_until

IMAGE_VARIABLES = dict(re.findall(r"(LISAREC_\w+)=(\S+)", (ROOT / "docker" / "Dockerfile").read_text()))
STOP_SIGNALS = {"haproxy": signal.SIGUSR1}  # of images; others have TERM
OWN_FOLDERS = ("/usr/local/sbin", "/usr/local/bin")  # where the chart mounts programs; first in the images' PATH
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
DEFAULTS = {
    "initialDelaySeconds": 0,
    "periodSeconds": 10,
    "timeoutSeconds": 1,
    "failureThreshold": 3,
    "successThreshold": 1,
}


def write_atomically(folder: Path, files: Mapping[str, bytes], mode: int) -> None:
    """Write the files of a Secret or ConfigMap like a node does: readers see old or new ones."""
    folder.mkdir(parents=True, exist_ok=True)
    version = folder / f"..{time.time_ns()}"
    version.mkdir()
    for name, content in files.items():
        (version / name).write_bytes(content)
        (version / name).chmod(mode)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    link = folder / "..data_tmp"
    link.symlink_to(version.name)
    link.replace(folder / "..data")


@dataclass(frozen=True)
class Place:
    """Where a pod runs: its folder and address, translated names and ports, and the objects of the cluster."""

    root: Path
    address: str
    ports: Mapping[str, int]  # of this machine, by their names in the container
    variables: Mapping[str, str]  # that say where to listen, and whom to ask for names
    replacements: Mapping[str, str]  # of words in commands, variables and probes
    arguments: Sequence[str]  # beside those of the container
    objects: Sequence[Manifest]  # of the cluster
    volumes: Mapping[str, Path]  # the claims


class Pod:
    """A pod with one container, from its specification in the chart."""

    def __init__(self, spec: Manifest, place: Place) -> None:
        self.spec = spec
        self.place = place
        (self.container,) = spec["containers"]
        self.started = self.ready = self.terminating = False
        self.restarts = 0
        self.exit_code: int | None = None
        self.killed_late = False  # it took longer than its time of grace
        self._ended = threading.Event()
        self._mount()
        for container in spec.get("initContainers", ()):
            self._popen(container, self._command_of(container)).wait(PATIENCE_S)
        self.process = self._start()
        self._threads = [threading.Thread(target=self._watch, daemon=True)]
        self._threads += [threading.Thread(target=self._probe, args=(name,), daemon=True) for name in PROBES]
        for thread in self._threads:
            thread.start()

    def update_secret(self, name: str, files: Mapping[str, bytes]) -> None:
        """Update the files of a Secret, as a node does within a minute."""
        (volume,) = (one for one in self.spec["volumes"] if one.get("secret", {}).get("secretName") == name)
        (mount,) = (one for one in self.container["volumeMounts"] if one["name"] == volume["name"])
        write_atomically(self.place.root / mount["mountPath"].lstrip("/"), files, volume["secret"]["defaultMode"])

    def log(self) -> str:
        """Output of the container."""
        return (self.place.root / "log").read_text(errors="replace")

    def execute(self, *command: str) -> str:
        """Run a command in the container, which must succeed; return its output."""
        done = subprocess.run(
            [self._translated(word) for word in command],
            env=self._environment(self.container),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def kill(self) -> None:
        """Kill the container like an out-of-memory kill; the node restarts it at the same address."""
        self.process.kill()

    def delete(self, on_endpoints: Callable[[], None] = lambda: None) -> None:
        """End the pod as a node does: sleep, signal, grace; returns when it is gone.

        on_endpoints  is called at the same time as the pod begins to end
        """
        self.terminating = True
        on_endpoints()
        begin_s = time.monotonic()
        time.sleep(self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
        image = self.container["image"].partition(":")[0]
        self.process.send_signal(STOP_SIGNALS.get(image, signal.SIGTERM))
        left_s = self.spec["terminationGracePeriodSeconds"] - (time.monotonic() - begin_s)
        try:
            self.exit_code = self.process.wait(left_s)
        except subprocess.TimeoutExpired:
            self.killed_late = True
        self.vanish()

    def vanish(self) -> None:
        """End at once, like the machine of the pod."""
        self.terminating = True
        self._ended.set()
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for thread in self._threads:
            thread.join()

    def _mount(self) -> None:
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        for mount in self.container["volumeMounts"]:
            target = self.place.root / mount["mountPath"].lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            volume = volumes.get(mount["name"], {})
            if "subPath" in mount:
                config = self._object("ConfigMap", volume["configMap"]["name"])
                target.write_text(replaced(config["data"][mount["subPath"]], self._places()))
                target.chmod(volume["configMap"]["defaultMode"])
            elif "configMap" in volume:
                files = self._object("ConfigMap", volume["configMap"]["name"])["data"]
                write_atomically(target, {name: text.encode() for name, text in files.items()}, 0o644)
            elif "secret" in volume:
                data = self._object("Secret", volume["secret"]["secretName"])["data"]
                all_of_it = [{"key": name, "path": name} for name in data]
                items = volume["secret"].get("items", all_of_it)
                files = {item["path"]: base64.b64decode(data[item["key"]]) for item in items}
                write_atomically(target, files, volume["secret"]["defaultMode"])
            elif "emptyDir" in volume:
                target.mkdir(exist_ok=True)
            else:
                target.symlink_to(self.place.volumes[mount["name"]])

    def _object(self, kind: str, name: str) -> Manifest:
        (found,) = (one for one in self.place.objects if (one["kind"], one["metadata"]["name"]) == (kind, name))
        return found

    def _translated(self, text: str) -> str:
        """Replace paths and ports of the container by those of this machine."""
        return replaced(text, {**self._places(), **self.place.replacements})

    def _places(self) -> dict[str, str]:
        """Local path of each mount of the container."""
        mounts = self.container["volumeMounts"]
        return {mount["mountPath"]: f"{self.place.root}{mount['mountPath']}" for mount in mounts}

    def _command_of(self, container: Manifest) -> list[str]:
        command = [*container.get("command", ()), *container.get("args", ())]
        if "lisarec" in container["image"]:  # docker/start, the image's entrypoint, becomes this
            return [sys.executable, "-m", "app", *map(self._translated, command)]
        return [self._translated(word) for word in command]

    def _environment(self, container: Manifest) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("LISAREC_")}
        folders = [*(f"{self.place.root}{folder}" for folder in OWN_FOLDERS), inherited["PATH"], "/usr/sbin"]
        given = IMAGE_VARIABLES if "lisarec" in container["image"] else {}
        given = {**given, **(environment_of(container) if "env" in container else {})}
        translated = {name: self._translated(value) for name, value in given.items()}
        return {**inherited, "PATH": os.pathsep.join(folders), **translated, **self.place.variables}

    def _popen(self, container: Manifest, command: list[str]) -> subprocess.Popen[bytes]:
        environment = self._environment(container)
        if command[0] != sys.executable:
            command = [program_of(command[0], environment["PATH"]), *command[1:]]
        with (self.place.root / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True)

    def _watch(self) -> None:
        """Restart an ended container until the pod ends."""
        while not self._ended.wait(POLL_EVERY_S):
            if self.process.poll() is not None and not self.terminating:
                if self.spec.get("restartPolicy") == "Never":
                    self.exit_code = self.process.returncode
                    self._ended.set()
                else:
                    self._restart()

    def _probe(self, name: str) -> None:
        """Run a probe on schedule and act on its results, until the pod ends."""
        probe = DEFAULTS | self.container.get(name, {})
        failures, due_s = 0, time.monotonic()
        while not self._ended.wait(POLL_EVERY_S):
            if self.started == (name == "startupProbe"):
                failures = 0
            elif time.monotonic() >= max(due_s, self.begun_s + probe["initialDelaySeconds"]):
                process, due_s = self.process, time.monotonic() + probe["periodSeconds"]
                passed = name not in self.container or self._passes(probe)
                if process is self.process:  # else another one runs by now
                    failures = 0 if passed else failures + 1
                    self._conclude(name, passed, failures >= probe["failureThreshold"])

    def _conclude(self, name: str, passed: bool, failed: bool) -> None:
        if name == "readinessProbe":
            self.ready = passed or (self.ready and not failed)
        elif name == "startupProbe":
            self.started = passed
        if failed and name != "readinessProbe" and not self.terminating:
            self.process.kill()

    def _restart(self) -> None:
        self.restarts += 1
        self.started = self.ready = False
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.begun_s = time.monotonic()
        return self._popen(self.container, [*self._command_of(self.container), *self.place.arguments])

    def _passes(self, probe: Manifest) -> bool:
        timeout_s = probe["timeoutSeconds"]
        if "exec" in probe:
            command = [self._translated(word) for word in probe["exec"]["command"]]
            with suppress(subprocess.TimeoutExpired):
                environment = self._environment(self.container)
                done = subprocess.run(command, env=environment, capture_output=True, timeout=timeout_s)
                return done.returncode == 0
            return False
        get = probe["httpGet"]
        with suppress(httpx.TransportError):
            url = f"{scheme_of(probe)}://{self.place.address}:{self.place.ports[get['port']]}{get['path']}"
            return 200 <= fetch(url, timeout_s).status_code < 400
        return False


def scheme_of(probe: Manifest) -> str:
    """Scheme of a probe: `https` or `http`."""
    return str(probe["httpGet"].get("scheme", "HTTP")).lower()


def replaced(text: str, replacements: Mapping[str, str]) -> str:
    """Replace each of the words where it is not part of another one."""
    longest_first = sorted(replacements, key=len, reverse=True)
    found = re.compile("|".join(rf"(?<![\w/.-]){re.escape(word)}(?![\w-])" for word in longest_first))
    return found.sub(lambda word: replacements[word[0]], text)


def program_of(name: str, path: str) -> str:
    """The program in the pod's own files, or else of this machine."""
    for folder in path.split(os.pathsep)[: len(OWN_FOLDERS)]:
        if (own := Path(folder) / name).exists():
            return str(own)
    return program(name)


def wait_until_ready(*pods: Pod) -> None:
    """Wait until all of the pods are ready."""
    for pod in pods:
        wait_until(lambda pod=pod: pod.ready, pod.log)  # type: ignore[misc]
