"""transformers' own tests of a model, run on exports; by test_transformers_suite.py only."""

import unittest
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers_tests.test_modeling_common import ModelTesterMixin

from canon_pretrain.hf.config import MODEL_TYPE, to_fields
from canon_pretrain.hf.modeling_canon import (
    LlamaCanonConfig,
    LlamaCanonForCausalLM,
    LlamaCanonForSequenceClassification,
    LlamaCanonForTokenClassification,
    LlamaCanonModel,
)
from tests.variants import variant

# as a user registers classes that are not loaded from a folder
transformers.AutoConfig.register(MODEL_TYPE, LlamaCanonConfig)
transformers.AutoModel.register(LlamaCanonConfig, LlamaCanonModel)
transformers.AutoModelForSequenceClassification.register(
    LlamaCanonConfig, LlamaCanonForSequenceClassification
)

# the names by which transformers' tests know what a class returns, and which labels it takes
modeling_auto.MODEL_MAPPING_NAMES[MODEL_TYPE] = "LlamaCanonModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = "LlamaCanonForCausalLM"
modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[MODEL_TYPE] = (
    "LlamaCanonForSequenceClassification"
)
modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[MODEL_TYPE] = (
    "LlamaCanonForTokenClassification"
)


class Inputs:
    """The small config and inputs that transformers' tests ask for."""

    is_training = True
    batch_size = 3
    seq_length = 7
    num_hidden_layers = 2
    hidden_size = 32
    num_labels = 3

    def __init__(self, name: str) -> None:
        self.args = variant(name)
        self.vocab_size = self.args.vocab_size
        self.num_attention_heads = self.args.num_heads

    def get_config(self) -> LlamaCanonConfig:
        return LlamaCanonConfig(
            **to_fields(self.args), pad_token_id=0, eos_token_id=2, bos_token_id=2
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[LlamaCanonConfig, dict[str, Any]]:
        shape = (self.batch_size, self.seq_length)
        ids = torch.randint(3, self.vocab_size, shape)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class Suite(ModelTesterMixin):
    """Classes of an export, and what they have."""

    name: str
    all_model_classes = (
        LlamaCanonModel,
        LlamaCanonForCausalLM,
        LlamaCanonForSequenceClassification,
        LlamaCanonForTokenClassification,
    )

    def setUp(self) -> None:
        self.model_tester = Inputs(self.name)


class AttentionCanonTest(Suite, unittest.TestCase):
    name = "partial_rope_c ABCD qk_full"


class GLATest(Suite, unittest.TestCase):
    name = "gla AC conv"
    has_attentions = False


class Mamba2CanonTest(Suite, unittest.TestCase):
    name = "mamba2 AB"
    has_attentions = False


class GatedDeltaNetTest(Suite, unittest.TestCase):
    name = "gdn ABCD"
    has_attentions = False


class MoECapacityTest(Suite, unittest.TestCase):
    name = "rope ABC moe capacity"
    test_all_params_have_gradient = False  # those of an expert that no token chooses
