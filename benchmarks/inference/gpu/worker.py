"""The process of one stage: an error of a device ends all work of a process on it, so that each stage has its own.

python -m benchmarks.inference.gpu.worker NAME OPTIONS
"""

from __future__ import annotations

import importlib
import sys
import traceback

from benchmarks.inference.gpu.stage import DONE, FAILED, StageOptions, StageRecorder


def main(name: str, options: StageOptions) -> bool:
    """Measure a stage and write its result; return whether it did not fail."""
    recorder = StageRecorder(name, options)
    try:
        importlib.import_module(f"benchmarks.inference.gpu.{name}").measure(options, recorder)
    except Exception:  # whatever it is, the other stages go on
        recorder.end(FAILED, traceback.format_exc(limit=-8))
        return False
    recorder.end(DONE)
    return True


if __name__ == "__main__":
    sys.exit(0 if main(sys.argv[1], StageOptions.from_json(sys.argv[2])) else 1)
