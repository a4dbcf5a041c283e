"""A folder with the layout of PhysicsLM4, of this project's own words, and a tokenizer for it."""

import itertools

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from canon_pretrain.synthetic.capo_words import LISTS, TEMPLATES
from canon_pretrain.synthetic.release_words import FOLDER, SOURCE, TEXT_FUNCTION
from canon_pretrain.synthetic.release_words import TEMPLATES as RELEASED_TEMPLATES

NAMES = {"first_name": "first", "middle_name": "middle", "last_name": "last"}
VALUES = {"city": "city", "university": "university", "field": "major"}


def words(name, size):
    """Return the first words of a list of this project."""
    parts = [row.split(",") for row in LISTS[name]]
    return list(itertools.islice(map("".join, itertools.product(*parts)), size))


def write_clone(folder):
    """Write lists of the release's sizes and templates into a clone, some with odd endings."""
    fields = folder / FOLDER / "fields"
    fields.mkdir(parents=True)
    sizes = {
        "first": 400,
        "middle": 400,
        "last": 1000,
        "city": 200,
        "university": 300,
        "major": 100,
    }
    lists = {name: words(own, sizes[own]) for name, own in (NAMES | VALUES).items()}
    lists["city"][3] += " D.C."
    lists["university"][1] = lists["university"][0] + " at Home"
    employers = words("employer", 263)
    employers[7] += " Inc."
    lists["company"] = [
        f"{employer}; {lists['city'][(61 * place + 17) % 200]}"
        for place, employer in enumerate(employers)
    ]
    for name, of_list in lists.items():
        (fields / f"{name}.txt").write_bytes("".join(f"{word}\r\n" for word in of_list).encode())

    source = f"def {TEXT_FUNCTION}(person):\n"
    for (name, value), sentences in zip(
        RELEASED_TEMPLATES.items(), TEMPLATES.values(), strict=True
    ):
        texts = [
            sentence.replace("{She}", "{name}").replace("{her}", "their").replace("{value}", value)
            for sentence in sentences
        ]
        source += f"    {name} = {[text.replace(' .', '.') for text in texts]!r}\n"
    (folder / FOLDER / SOURCE).write_text(source)
    return folder


def write_tokenizer(path, texts):
    """Write the tokenizer.json of a small byte-level BPE that splits texts as GPT-2's does."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return str(path)
