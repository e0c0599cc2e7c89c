from __future__ import annotations

import json

import pytest

from dsv32_ops.models import PRESETS, load_config

V32_FIELDS = {
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "num_attention_heads": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "rms_norm_eps": 1e-06,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
}
INDEX_FIELDS = ("index_n_heads", "index_head_dim", "index_topk")


def write(tmp_path, fields):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    return path


def sizes(config):
    values = dict(vars(config))
    del values["name"]
    return values


def test_presets_have_the_documented_sizes():
    v32, glm, kimi = (PRESETS[name] for name in ("deepseek-v3.2", "glm-5", "kimi-k2"))
    assert (v32.hidden_size, v32.q_lora_rank, v32.num_heads) == (7168, 1536, 128)
    assert (glm.hidden_size, glm.q_lora_rank, glm.num_heads) == (6144, 2048, 64)
    assert (kimi.hidden_size, kimi.q_lora_rank, kimi.num_heads) == (7168, 1536, 64)
    assert [c.index_heads for c in (v32, glm, kimi)] == [64, 32, 0]
    assert [c.index_rope_interleave for c in (v32, glm)] == [False, True]
    assert [c.has_indexer for c in (v32, glm, kimi)] == [True, True, False]
    for name, config in PRESETS.items():
        assert config.name == name
        assert (config.kv_lora_rank, config.rope_dim) == (512, 64)
        assert config.has_indexer == bool(config.index_heads and config.index_dim)
    assert len(set(PRESETS.values())) == 3


def test_a_deepseek_config_reads_as_the_preset(tmp_path):
    path = write(tmp_path, V32_FIELDS)
    for source in (path, str(path), tmp_path):
        config = load_config(source)
        assert config.name == "deepseek_v32"
        assert sizes(config) == sizes(PRESETS["deepseek-v3.2"])


def test_a_glm_config_reads_as_the_preset(tmp_path):
    fields = {
        **V32_FIELDS,
        "model_type": "glm_moe_dsa",
        "hidden_size": 6144,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "num_attention_heads": 64,
        "index_n_heads": 32,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "rms_norm_eps": 1e-05,
        "vocab_size": 154880,
        "max_position_embeddings": 202752,
    }
    del fields["rope_theta"], fields["rope_scaling"]
    config = load_config(write(tmp_path, fields))
    assert sizes(config) == sizes(PRESETS["glm-5"])


def test_the_rotation_style_can_be_given(tmp_path):
    fields = {**V32_FIELDS, "indexer_rope_interleave": True}
    assert load_config(write(tmp_path, fields)).index_rope_interleave
    assert not load_config(write(tmp_path, V32_FIELDS)).index_rope_interleave


def test_a_config_without_index_fields_has_no_indexer(tmp_path):
    fields = {key: value for key, value in V32_FIELDS.items() if key not in INDEX_FIELDS}
    config = load_config(write(tmp_path, fields))
    assert not config.has_indexer
    assert (config.index_heads, config.index_dim, config.index_topk) == (0, 0, 0)


def test_yarn_in_rope_parameters_keeps_theta_apart(tmp_path):
    fields = {key: value for key, value in V32_FIELDS.items() if key != "rope_theta"}
    fields["rope_parameters"] = {**fields.pop("rope_scaling"), "rope_theta": 10000}
    config = load_config(write(tmp_path, fields))
    assert config.rope_theta == 10000.0
    assert config.rope_scaling == V32_FIELDS["rope_scaling"]


def test_a_nested_language_model_is_read(tmp_path):
    path = write(tmp_path, {"model_type": "outer", "text_config": V32_FIELDS})
    assert load_config(path).name == "deepseek_v32"


OPTIONAL = ("model_type", "rope_scaling", "qk_nope_head_dim")


@pytest.mark.parametrize("field", sorted(set(V32_FIELDS) - set(OPTIONAL)))
@pytest.mark.parametrize("how", ["absent", "null"])
def test_a_missing_field_is_named_with_its_file(tmp_path, field, how):
    fields = {**V32_FIELDS, field: None}
    if how == "absent":
        del fields[field]
    path = write(tmp_path, fields)
    with pytest.raises(ValueError, match=f"'{field}' is missing") as error:
        load_config(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("text", ["{", "[1, 2]"])
def test_a_file_that_is_no_object_is_named(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="config.json: "):
        load_config(path)
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path / "other.json")
