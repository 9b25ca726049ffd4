"""The process of one stage. Each stage has its own, because an error of the device ends all work of its process.

python -m benchmarks.inference.gpu.worker NAME OPTIONS
"""

from __future__ import annotations

import importlib
import sys
import traceback

from benchmarks.inference.gpu.stage import DONE, FAILED, StageOptions, StageRecorder


def main(name: str, options: StageOptions) -> bool:
    """Measure a stage and write its result; return whether it has succeeded."""
    recorder = StageRecorder(name, options)
    try:
        importlib.import_module(f"benchmarks.inference.gpu.{name}").measure(options, recorder)
    except Exception:  # any error, because the other stages continue
        recorder.end(FAILED, traceback.format_exc(limit=-8))
        return False
    recorder.end(DONE)
    return True


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1], StageOptions.from_json(sys.argv[2])) else 1)
