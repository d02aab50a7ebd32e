"""The sizes of vision encoders, by the words of their config.json."""

import pytest

from windtunnel.model.vision import Vision, vision_of

QWEN_2_5 = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
QWEN_2 = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14}
PIXTRAL = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"vision_config": QWEN_2_5}, Vision(32, 1280, 16, 3420, 1176, 2, 3584, True, 64, 4)),
        (
            {"vision_config": {**QWEN_2, "temporal_patch_size": 2, "spatial_merge_size": 2}},
            Vision(32, 1280, 16, 5120, 1176, 2, 3584, full_layers=32),
        ),
        (
            {
                "vision_config": {**PIXTRAL, "patch_size": 16, "hidden_act": "silu"},
                "spatial_merge_size": 2,
                "text_config": {"hidden_size": 5120},
            },
            Vision(24, 1024, 16, 4096, 768, 2, 5120, True, full_layers=24),
        ),
    ],
)
def test_sizes(config: dict[str, object], expected: Vision) -> None:
    found = vision_of(config)
    assert found == expected
    assert expected.patches(256) == 1024


@pytest.mark.parametrize(
    "config", [{}, {"vision_config": {**PIXTRAL, "patch_size": 14}}, {"vision_config": {**QWEN_2_5, "num_heads": "x"}}]
)
def test_others_are_not_known(config: dict[str, object]) -> None:
    assert vision_of(config) is None
