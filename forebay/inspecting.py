"""What only a look can tell of a model's version, asked before it is registered: its weights, its arguments.

Implements the part of the registry's inspector that concerns versions (`scheduler.runtime.models.checks`).
"""

import dataclasses
import json
import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines import lora, settings
from engines.slot import children
from engines.vllm import arguments, multinode
from engines.weights import examine, sources, stager
from scheduler.contracts import fleet, tuning, weights
from scheduler.runtime.models import checks, document

PARSER_S = 300.0  # importing vLLM takes 11 s, and minutes on a machine that is full
log = logging.getLogger(__name__)


class Inspector(checks.Unseen):
    """Looks at versions.

    Args:
        options: the [engines] settings of this host.
        adapter_folders: in which adapters may lie.
        node_gpus: GPUs of a node; 0: not known, and nothing goes over several.
    """

    def __init__(
        self,
        options: settings.EnginesSettings,
        adapter_folders: Sequence[str] = (),
        node_gpus: int = 0,
    ) -> None:
        self._node_gpus = node_gpus
        self._options = options
        self._folders = adapter_folders

    def adapter(self, adapter: document.Adapter, versions: Sequence[fleet.ReplicaSpec]) -> str:
        """Return what is wrong with an adapter, as one line with the fix; "" if nothing is."""
        bases = [spec for spec in versions if spec.engine is fleet.EngineKind.VLLM]
        if weights.staged(adapter.path) and any(self._nodes(spec) > 1 for spec in versions):
            return (
                f"{adapter.path} would be staged on the first alone of the nodes that a version goes over: "
                "give it a plain folder that all nodes see"
            )
        try:
            place = weights.parse(adapter.path) if weights.staged(adapter.path) else None
            how = stager.places(self._options)
            if place is None or place.scheme == "file":
                folder = Path(adapter.path if place is None else place.path)
                lora.judge(folder, adapter.rank, bases, self._folders, how)
            else:
                source = sources.of(place, how)
                lora.judge_place(source, adapter.path, adapter.rank, bases, how)
        except (lora.AdapterError, weights.WeightsError) as error:
            return str(error)
        except sources.SourceDown as error:
            return f"the adapter or its base can't be looked at now: {error}; try again when it can"
        return ""

    def version(self, spec: fleet.ReplicaSpec) -> str:
        """Return what is wrong with a version, as one line with the fix; "" if nothing is."""
        if fault := self._wide(spec):
            return fault
        if spec.engine is not fleet.EngineKind.VLLM:
            return ""
        try:
            arguments.command_line(spec)
            self._look(spec)
        except (arguments.ArgumentError, weights.WeightsError) as error:
            return str(error)
        except sources.SourceDown as error:
            return f"weights can't be looked at now: {error}; try again when they can"
        return self._parsed(spec)

    def blind(self, spec: fleet.ReplicaSpec) -> str:
        """Return what of a version could not be looked at from this host, as one line; "" if all was."""
        if spec.engine is not fleet.EngineKind.VLLM or self._parser():
            return ""
        return (
            "vLLM's own parser has not judged its arguments, as there is no vLLM on the gateway's host "
            "([engines] vllm_python): its first replica will tell"
        )

    def _parser(self) -> str:
        """Return the Python that has vLLM's parser, "" where there is none on this host."""
        python = self._options.vllm_python
        return python if python and os.access(python, os.X_OK) else ""

    def _nodes(self, spec: fleet.ReplicaSpec) -> int:
        """Return over how many nodes a replica goes."""
        whole = spec.hardware.gres == "gpu" and self._node_gpus
        return max(1, -(-spec.gpus // self._node_gpus)) if whole else 1

    def _wide(self, spec: fleet.ReplicaSpec) -> str:
        """Return why a version that is larger than a node can't go over several."""
        nodes = self._nodes(spec)
        if nodes == 1:
            return ""
        if spec.engine is fleet.EngineKind.HTTP:
            return f"gpus {spec.gpus}: an external server goes over no nodes of a lease: lower it"
        if spec.engine is fleet.EngineKind.VLLM:
            return multinode.misfit(spec, nodes)
        return "" if spec.gpus % nodes == 0 else multinode.uneven(spec.gpus, nodes)

    def _look(self, spec: fleet.ReplicaSpec) -> None:
        """Look at the weights' headers where they lie."""
        place = weights.Place("file", "", spec.weights)
        if weights.staged(spec.weights):
            place = weights.parse(spec.weights)
        elif not Path(spec.weights).is_absolute():
            raise weights.WeightsError(
                f"weights {spec.weights!r}: write an absolute folder, or file://, s3://, hf:// "
                "to have them staged"
            )
        source = sources.of(place, stager.places(self._options))
        sizes = {one.name: one.size for one in source.files()}
        unsafe = self._options.weights_unsafe
        tuned = tuning.read(spec.tuning)
        found = examine.examine(sizes, source.read, spec.weights, unsafe=unsafe)
        if found.fp8 and not tuned.quantization_approval:
            raise weights.WeightsError(
                f"{spec.weights}: these weights are fp8 ({found.fp8}), and the version has no "
                "quantization_approval: name who has allowed it, and where its quality was measured"
            )
        if tuned.speculative is not None and tuned.speculative.model:
            draft = sources.Folder(Path(tuned.speculative.model))
            there = {one.name: one.size for one in draft.files()}
            examine.examine(there, draft.read, tuned.speculative.model, unsafe=unsafe)
        if not spec.weights_digest:
            return
        at = sizes.get(weights.MANIFEST)
        if at is None:
            raise weights.WeightsError(
                f"{spec.weights}: weights_digest is set and no {weights.MANIFEST} lies there: "
                "make it with `fctl weights "
                "manifest`, and take its digest"
            )
        text = bytes(source.read(weights.MANIFEST, 0, at))
        said = weights.Manifest.read(text, f"{spec.weights}/{weights.MANIFEST}")
        if said.digest != spec.weights_digest:
            raise weights.WeightsError(
                f"{spec.weights}: weights_digest is {spec.weights_digest[:16]}…, the manifest "
                "there has "
                f"{said.digest[:16]}…: take that, or put the right files there"
            )

    def _parsed(self, spec: fleet.ReplicaSpec) -> str:
        """Ask vLLM's own parser, where vLLM is on this host; where not, a replica's start will."""
        python = self._parser()
        if not python:
            return ""
        asked = json.dumps({**dataclasses.asdict(spec), "engine": spec.engine.value})
        try:
            told = subprocess.run(
                [python, "-P", "-m", "engines.vllm.check"],
                input=asked + "\n",
                env=children.environment({}),
                capture_output=True,
                text=True,
                timeout=PARSER_S,
                check=True,
            )
            return str(json.loads(told.stdout.splitlines()[-1])["fault"])
        except (OSError, subprocess.SubprocessError, ValueError, IndexError, KeyError) as error:
            log.warning("vLLM's parser on this host: %s", error)
            why = type(error).__name__
            return (
                f"vLLM's parser could not be asked ({why}): see the gateway's log, then try again"
            )


def look(
    named: str, options: settings.EnginesSettings, *, manifest: bool, write: bool
) -> Mapping[str, Any]:
    """Return what a place holds; with ``manifest``, everything is read, and ``write`` leaves it there.

    Raises:
        weights.WeightsError: it can't be used as it is, does not answer, or can't be written to.
    """
    place = weights.parse(named)
    source = sources.of(place, stager.places(options))
    unsafe = options.weights_unsafe
    try:
        if not manifest:
            sizes = {one.name: one.size for one in source.files()}
            found = examine.examine(sizes, source.read, named, unsafe=unsafe)
            return {
                "place": named,
                "files": list(found.names),
                "bytes": found.size,
                "parameters": found.parameters,
                "dtypes": " ".join(found.dtypes),
            }
        made = examine.manifest(source, named, unsafe=unsafe)
    except sources.SourceDown as error:
        raise weights.WeightsError(f"{error}; try again when it answers") from error
    if write:
        if place.scheme != "file":
            raise weights.WeightsError(
                f"{named}: --write knows file:// only; print it with --json and upload it as "
                f"{weights.MANIFEST}"
            )
        try:
            (Path(place.path) / weights.MANIFEST).write_text(made.text())
        except OSError as error:
            raise weights.WeightsError(f"{place.path}: {error.strerror}") from error
    body: dict[str, Any] = json.loads(made.text())
    return body | {"place": named, "bytes": made.size}
