"""Renders one simulation to frames, with Gymnasium's own renderer and camera. Loads OpenGL on first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import mujoco
import numpy as np
from tinker_atropos.errors import RunError

from tinker_atropos_humanoid.locomotion.options import LocomotionOptions, RenderMode
from tinker_atropos_humanoid.locomotion.simulations import Simulations

FOLLOWING = "track"


class Renderer:
    """Renders any of the simulations; all share one OpenGL context."""

    def __init__(self, simulations: Simulations, options: LocomotionOptions, camera: Mapping[str, Any]) -> None:
        self._simulations = simulations
        self._options = options
        configured = options.default_camera_config if options.default_camera_config is not None else camera
        self._camera = {
            key: np.array(value) if isinstance(value, list | tuple) else value for key, value in configured.items()
        }
        self._data = mujoco.MjData(simulations.model)
        self._renderer: Any = None

    def frame(self, index: int, mode: RenderMode) -> Any:
        """Return the frame, uint8[height, width, 3] for `rgb_array`; raises `RunError` where OpenGL is missing."""
        self._simulations.data(index, self._data)
        try:
            with _headless_default():
                if self._renderer is None:
                    self._renderer = self._made()
                return self._renderer.render(mode)
        except Exception as error:
            backend = os.environ.get("MUJOCO_GL", "")
            raise RunError(
                f"can't render with OpenGL (MUJOCO_GL={backend!r}): {type(error).__name__}: {error}. On a machine "
                "without a display set MUJOCO_GL=egl (`apt-get install libegl1`) or MUJOCO_GL=osmesa (`apt-get install "
                "libosmesa6`) before the run starts"
            ) from error

    def _made(self) -> Any:
        from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

        options, model = self._options, self._simulations.model
        return MujocoRenderer(
            model,
            self._data,
            self._camera,
            options.width,
            options.height,
            options.max_geom,
            options.camera_id,
            FOLLOWING if self._may_follow() else options.camera_name,
            options.visual_options,
        )

    def _may_follow(self) -> bool:
        """Whether the user chose no camera and the model has the one that goes along.

        Gymnasium 1.4 takes its free camera then, which stays at the start: whoever walks leaves the picture.
        """
        options = self._options
        chosen = (options.camera_id, options.camera_name, options.default_camera_config)
        known = mujoco.mj_name2id(self._simulations.model, mujoco.mjtObj.mjOBJ_CAMERA, FOLLOWING) != -1
        return known and all(choice is None for choice in chosen)

    def close(self) -> None:
        """Free the OpenGL context."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


@contextmanager
def _headless_default() -> Iterator[None]:
    """Use EGL on Linux without a display, unless told otherwise: Gymnasium would take GLFW, which needs a display."""
    display = any(name in os.environ for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"))
    if display or not sys.platform.startswith("linux"):
        yield
        return
    os.environ["MUJOCO_GL"] = "egl"
    try:
        yield
    finally:
        del os.environ["MUJOCO_GL"]
