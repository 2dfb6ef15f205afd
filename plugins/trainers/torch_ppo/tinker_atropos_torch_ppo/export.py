"""Export of a policy for use without this project: raw observations in, the action that it likes best out."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
from tinker_atropos.errors import CheckpointError

from tinker_atropos_torch_ppo.inference import Snapshot
from tinker_atropos_torch_ppo.stored import POLICY_FILE

OPSET = 17
ONNX_FILE, SCRIPT_FILE = "policy.onnx", "policy.py"
SCRIPT = Path(__file__).with_name("standalone.py")


def export(snapshot: Snapshot, to: Path) -> None:
    """Write `policy.npz` with `policy.py`, which acts with NumPy alone, into `to`; `policy.onnx` if onnx is installed.

    Each takes raw `observations float32[N, …]` and gives `actions` as the environment takes them: `float32[N, A]`
    within the space's bounds, or `int64[N]` counted from its `start`.
    """
    contents = {POLICY_FILE: snapshot.to_bytes(), SCRIPT_FILE: SCRIPT.read_bytes()}
    if importlib.util.find_spec("onnx") is not None:
        contents[ONNX_FILE] = onnx_model(snapshot)
    taken = [to / name for name in contents if (to / name).exists()]
    if taken:
        raise CheckpointError(f"{taken[0]} exists; choose another folder for the export")
    try:
        to.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (to / name).write_bytes(content)
    except OSError as error:
        raise CheckpointError(f"{to} can't be written: {error.strerror or error}; choose another folder") from error


def onnx_model(snapshot: Snapshot) -> bytes:
    """Return the policy as the content of an ONNX file, opset 17."""
    import onnx  # type: ignore[import-not-found, unused-ignore]
    from onnx import TensorProto, helper, numpy_helper

    shape = snapshot.shape
    nodes: list[Any] = []
    constants: list[Any] = []
    current = "observations"

    def constant(name: str, value: Any, dtype: Any = np.float32) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value, dtype=dtype), name))
        return name

    def add(kind: str, *inputs: str, **attributes: Any) -> None:
        nonlocal current
        output = f"{kind.lower()}_{len(nodes)}"
        nodes.append(helper.make_node(kind, [current, *inputs], [output], **attributes))
        current = output

    if len(shape.observation) > 1:
        add("Flatten", axis=1)
    add("Sub", constant("mean", snapshot.mean))
    add("Mul", constant("scale", snapshot.scale))
    if math.isfinite(snapshot.clip):
        add("Clip", constant("lowest", -snapshot.clip), constant("highest", snapshot.clip))
    for i, (weight, bias) in enumerate(zip(snapshot.weights, snapshot.biases, strict=True)):
        if i > 0:
            add({"tanh": "Tanh", "relu": "Relu"}[snapshot.activation])
        add("Gemm", constant(f"weight_{i}", weight), constant(f"bias_{i}", bias))
    if shape.discrete:
        add("ArgMax", axis=1, keepdims=0)
        add("Add", constant("start", shape.start, np.int64))
        output = helper.make_tensor_value_info("actions", TensorProto.INT64, ["N"])
    else:
        add("Max", constant("low", shape.low))
        add("Min", constant("high", shape.high))
        output = helper.make_tensor_value_info("actions", TensorProto.FLOAT, ["N", shape.actions])
    nodes.append(helper.make_node("Identity", [current], ["actions"]))
    observed = helper.make_tensor_value_info("observations", TensorProto.FLOAT, ["N", *shape.observation])
    graph = helper.make_graph(nodes, "policy", [observed], [output], constants)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8, producer_name="tinker-atropos"
    )
    model.metadata_props.add(key="task", value=shape.task)
    onnx.checker.check_model(model)
    return bytes(model.SerializeToString())
