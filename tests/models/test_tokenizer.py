import torch

from confed.models.tokenizer import SPECIAL_TOKENS, SUFFIXES, WordTokenizer, bert_tokenizer
from refusals import refuses

WORDS = ["what", "color", "is", "the", "dog"]
FIRST = len(SPECIAL_TOKENS) + len(SUFFIXES)
PAD, UNK, CLS, SEP = 0, 1, 2, 3


def test_ids_of_words_equal_those_by_hand():
    tokenizer = WordTokenizer(WORDS, max_length=9)
    ids, mask = tokenizer(["What color is the DOG?", "the zebra", "dogs"])
    word = {w: FIRST + i for i, w in enumerate(WORDS)}
    assert ids.tolist() == [
        [CLS, *(word[w] for w in WORDS), SEP, PAD, PAD],
        [CLS, word["the"], UNK, SEP, PAD, PAD, PAD, PAD, PAD],
        [CLS, word["dog"], len(SPECIAL_TOKENS), SEP, PAD, PAD, PAD, PAD, PAD],
    ]
    assert mask.sum(1).tolist() == [7, 4, 4]
    assert ids.dtype == mask.dtype == torch.int64


def test_long_questions_keep_their_separator():
    tokenizer = WordTokenizer(WORDS, max_length=4)
    assert tokenizer.shortened([" ".join(WORDS), " ".join(WORDS[:2]), ""]) == 1
    ids, mask = tokenizer([" ".join(WORDS)])
    assert ids.tolist() == [[CLS, FIRST, FIRST + 1, SEP]]
    assert mask.all()


def test_a_common_beginning_keeps_its_ids():
    text = ["is the dog what color"]
    short, _ = WordTokenizer(WORDS)(text)
    long, _ = WordTokenizer([*WORDS, "ship", "harbour"])(text)
    assert torch.equal(short, long)


def test_no_texts_give_empty_tensors():
    ids, mask = WordTokenizer(WORDS, max_length=5)([])
    assert ids.shape == mask.shape == (0, 5)


def test_saved_tokenizer_reads_the_same_here_and_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    tokenizer, texts = WordTokenizer(WORDS, max_length=8), ["the dogs", "What, is?"]
    tokenizer.save(tmp_path)
    again = WordTokenizer.load(tmp_path)
    ids, mask = tokenizer(texts)
    assert again.vocab_size == tokenizer.vocab_size == FIRST + len(WORDS)
    assert torch.equal(again(texts)[0], ids)
    theirs = AutoTokenizer.from_pretrained(tmp_path)(texts, padding="max_length", truncation=True, max_length=8)
    assert theirs["input_ids"] == ids.tolist()
    assert theirs["attention_mask"] == mask.tolist()


def test_bert_vocabulary_file_agrees_with_transformers(tmp_path):
    from transformers import BertTokenizer

    vocabulary = [*SPECIAL_TOKENS, *WORDS, "?", "##s", "sh", "##ip"]
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(vocabulary) + "\n")
    texts = ["What color is the ship?", "the dogs what color is the dog"]
    ids, mask = bert_tokenizer(tmp_path, max_length=8)(texts)
    reference = BertTokenizer(vocab={word: i for i, word in enumerate(vocabulary)})
    expected = reference(texts, padding="max_length", truncation=True, max_length=8)
    assert ids.tolist() == expected["input_ids"]
    assert mask.tolist() == expected["attention_mask"]
    assert bert_tokenizer(file).vocab_size == len(vocabulary)


def test_bad_arguments_are_named(tmp_path):
    refuses("at least one word", WordTokenizer, [])
    refuses(r"max_length must be at least 3 .* got 2", WordTokenizer, WORDS, max_length=2)
    refuses("found no such file", WordTokenizer.load, tmp_path)
    refuses(r"expected tokenizer\.json or vocab\.txt", bert_tokenizer, tmp_path)
    refuses(r"a folder or a hub name, got '\./nowhere'", bert_tokenizer, "./nowhere")
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    refuses("special tokens, it lacks", bert_tokenizer, tmp_path)
