"""The tools around a model: a tokenizer made here, pipeline, stop strings, Trainer, data collators."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tost.integrations.transformers

# isort: split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    Trainer,
    TrainingArguments,
    pipeline,
)

from tests.integrations.transformers.models import KINDS, make
from tost.integrations.transformers import TostConfig, TostForCausalLM

TEXT = "the cat sat on the mat and the dog sat on the cat; "


def tokenizer(padding_side: str = "left") -> PreTrainedTokenizerFast:
    """Bytes, written as byte-level tokenizers write them, and two special tokens."""
    vocabulary = {"<pad>": 0, "<end>": 1}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    options = {"pad_token": "<pad>", "eos_token": "<end>", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side=padding_side, **options)


SIZES = {"vocab_size": 258, "max_position_embeddings": 96, "pad_token_id": 0, "eos_token_id": 1}


@pytest.fixture(scope="module")
def words():
    return tokenizer()


@pytest.mark.parametrize("kind", KINDS)
def test_pipeline(kind, words):
    model = make(kind, **SIZES)
    generator = pipeline("text-generation", model=model, tokenizer=words, device="cpu")
    prompts = ["the cat", "a", "the dog sat on"]
    options = {"max_new_tokens": 8, "do_sample": False, "return_full_text": True}
    together = generator(prompts, batch_size=3, **options)
    alone = [generator(prompt, **options) for prompt in prompts]
    assert together == alone
    assert all(out[0]["generated_text"].startswith(prompt) for out, prompt in zip(alone, prompts, strict=True))
    ids = words("the cat", return_tensors="pt").input_ids
    new = tost.generate(model.to_tost(), ids, max_new_tokens=8, temperature=0, stop_tokens=[1])
    assert alone[0][0]["generated_text"] == words.decode(new[0], skip_special_tokens=True)


def test_a_model_and_its_tokenizer_from_one_folder(words, tmp_path):
    make("plus", **SIZES).save_pretrained(tmp_path)
    words.save_pretrained(tmp_path)
    generator = pipeline("text-generation", model=str(tmp_path), device="cpu")
    assert type(generator.model) is TostForCausalLM
    assert len(generator("the", max_new_tokens=4, do_sample=False)[0]["generated_text"]) >= 3


def test_stop_strings(words):
    model = make("plus", **SIZES)
    prompt = words("the cat", return_tensors="pt")
    strange = [index for word, index in words.get_vocab().items() if not (len(word) == 1 and word.isascii())]
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "suppress_tokens": strange}
    text = words.decode(model.generate(**prompt, **options)[0])
    stop = text[12:14]
    cut = model.generate(**prompt, **options, stop_strings=[stop], tokenizer=words)
    assert words.decode(cut[0]) == text[: text.index(stop, 7) + len(stop)]


def test_text_is_streamed(words):
    model, streamer = make("plus", **SIZES), TextIteratorStreamer(words)
    out = model.generate(**words("the cat", return_tensors="pt"), max_new_tokens=8, do_sample=False, streamer=streamer)
    assert "".join(streamer) == words.decode(out[0])


def arguments(folder, **more):
    given = {"output_dir": str(folder), "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    given |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-2, "seed": 0}
    given |= {"save_strategy": "no", "dataloader_pin_memory": False}
    return TrainingArguments(**{**given, **more})


def examples(words, count=16):
    """Pieces of different length, so that batches are padded."""
    return [{"input_ids": words(TEXT[index : index + 20 + index % 7]).input_ids} for index in range(count)]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer_learns_evaluates_and_saves(words, tmp_path):
    torch.manual_seed(0)
    model = TostForCausalLM(TostConfig(embed_dim=32, depth=2, num_heads=4, layer_scale=1.0, conv_width=4, **SIZES))
    collator = DataCollatorForLanguageModeling(tokenizer("right"), mlm=False)
    data = examples(words)
    trainer = Trainer(
        model=model,
        args=arguments(tmp_path, max_steps=12, eval_strategy="steps", eval_steps=12),
        train_dataset=data,
        eval_dataset=data[:6],
        data_collator=collator,
    )
    trainer.train()
    found = losses(trainer)
    assert found[0] > 5.0
    assert found[-1] < 0.8 * found[0]
    evaluated = trainer.evaluate()["eval_loss"]
    with torch.no_grad():
        assert abs(model.eval()(**collator(data[:6])).loss.item() - evaluated) < 0.05
    assert trainer.predict(data[:4]).predictions.shape[-1] == 258
    trainer.save_model(tmp_path / "kept")
    again = TostForCausalLM.from_pretrained(tmp_path / "kept")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_trainer_accumulates_and_recomputes_the_same(words, tmp_path):
    collator, data = DataCollatorForLanguageModeling(tokenizer("right"), mlm=False), examples(words, 8)
    found = []
    split = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    for more in ({}, {"gradient_checkpointing": True}, split):
        args = arguments(tmp_path, max_steps=3, **more)
        trainer = Trainer(model=make("plus", **SIZES), args=args, train_dataset=data, data_collator=collator)
        trainer.train()
        found.append(losses(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    # The loss is a mean over all targets of a step, however they are split.
    assert found[2] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.slow
def test_the_example_of_the_trainer_runs_in_two_processes(tmp_path):
    example = Path(__file__).parents[3] / "examples" / "hf_trainer.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(example)]
    done = subprocess.run(
        [*command, "--steps", "2", "--out", str(tmp_path / "model")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("continuation:") == 1
