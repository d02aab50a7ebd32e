"""Run where ai-dynamo is installed: how Dynamo's own code reads a profile and a deployment, as one JSON line."""

import json
import sys
from pathlib import Path
from unittest.mock import MagicMock

for missing in ("aisimulate_core", "aisimulate_core.sdk"):
    sys.modules.setdefault(missing, MagicMock())

import yaml  # noqa: E402
from dynamo.planner.config.defaults import SubComponentType  # noqa: E402
from dynamo.planner.monitoring.perf_metrics import _convert_profiling_data_to_fpms  # noqa: E402
from dynamo.profiler.utils.config import Config  # noqa: E402

profile, deployment = sys.argv[1:]
config = Config.model_validate(yaml.safe_load(Path(deployment).read_text(encoding="utf-8")))
steps = {
    kind.value: [
        [each.wall_time, each.scheduled_requests.sum_prefill_tokens, each.scheduled_requests.sum_decode_kv_tokens]
        for each in _convert_profiling_data_to_fpms(profile, kind)
    ]
    for kind in (SubComponentType.PREFILL, SubComponentType.DECODE)
}
components = [[each.name, each.component_type, each.replicas] for each in config.spec.components]
sys.stdout.write(json.dumps({"steps": steps, "components": components}) + "\n")
