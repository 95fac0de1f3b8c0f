"""Tokenizers of characters and checkpoints, and chat templates."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
from episode_kit import byte_tokenizer
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hflow.base.errors import BackendError, DataError, RecipeError
from hflow.data.text.tokenizer import TextTokenizer, TokenizerSettings
from hflow.types import Tokenizer

ALPHABET = "0123456789+= abcdefghijklmnopqrstuvwxyz[]:\n"
OPENING = "{% if add_generation_prompt %}[assistant]{% endif %}"
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '' }}"
    "{{ '\\n' }}{% endfor %}" + OPENING
)
TAGGED = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<eos>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '\\n' }}"
    "{% endfor %}" + OPENING
)
STRIPPING = (
    "{% for m in messages %}{% if m.role == 'user' or loop.last %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four"},
]


def characters(chat_template: str | None = None) -> TextTokenizer:
    return TextTokenizer(TokenizerSettings(alphabet=ALPHABET, chat_template=chat_template))


def test_characters_are_tokens_in_alphabet_order() -> None:
    tokenizer = characters()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("01+ \n") == [4, 5, 14, 16, 4 + len(ALPHABET) - 1]
    assert tokenizer.decode([1, 4, 5, 14, 16, 2]) == "01+ "
    assert (tokenizer.prefix_ids, tokenizer.stop_ids, tokenizer.num_tokens) == ((1,), (2,), 4 + len(ALPHABET))


def test_raw_prompts_begin_with_bos() -> None:
    assert characters().encode_prompt("0=") == [1, 4, 15]


def test_arguments_are_encoded_once() -> None:
    """Templates write them as JSON, so text would become JSON in JSON."""
    template = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}"
        "[{{ call.function.name }}:{{ call.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    )
    for arguments in ({"a": [1]}, '{"a": [1]}'):
        call = {"function": {"name": "f", "arguments": arguments}}
        talk = [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        tokenizer = TextTokenizer(TokenizerSettings(alphabet=ALPHABET + '"{}', chat_template=template))
        assert tokenizer.decode_with_special(tokenizer.chat(talk).input_ids) == 'one[f:{"a": [1]}]'
    with pytest.raises(DataError, match=r"messages\[0\].role must be one of .* did you mean 'user'"):
        characters(PLAIN).chat([{"role": "human", "content": "one"}, TALK[1]])


@pytest.mark.parametrize("adds_bos", [True, False])
def test_the_tokenizer_says_how_texts_begin(adds_bos: bool, tmp_path: Path) -> None:
    """It may have a begin-of-text token that it does not add, and a rendered text has one of its own."""
    tokenizer = byte_tokenizer(tmp_path, CHATML, adds_bos=adds_bos)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    bos = [plain.bos_token_id]
    assert tokenizer.encode_prompt("1+1=") == plain("1+1=")["input_ids"]
    assert tokenizer.encode_prompt("1+1=") == bos * adds_bos + tokenizer.encode("1+1=")
    rendered = "<s>" + plain.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode_prompt(rendered) == bos + tokenizer.template().prompt(TALK[:1])
    assert tokenizer.join(rendered, "two").input_ids[:2] == (*bos, tokenizer.encode(rendered)[1])


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", ["{{ bos_token }}", ""])
def test_a_rendered_conversation_is_the_whole_prompt(template: str, adds_bos: bool, tmp_path: Path) -> None:
    """As in transformers: no begin-of-text token is added to those that the template has."""
    tokenizer = byte_tokenizer(tmp_path, template + CHATML, adds_bos=adds_bos)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    for messages, opening, ids in (
        (TALK[:1], True, tokenizer.template().prompt(TALK[:1])),
        (TALK, False, list(tokenizer.chat(TALK).input_ids)),
    ):
        expected = plain.apply_chat_template(messages, add_generation_prompt=opening, return_dict=True)
        assert ids == expected["input_ids"]
        assert ids.count(plain.bos_token_id) == bool(template)


def test_an_answer_that_ends_itself_has_one_end() -> None:
    assert characters().join("1+1=", "2<eos>").input_ids == characters().join("1+1=", "2").input_ids


def test_join_learns_the_answer_and_its_end() -> None:
    talk = characters().join("1+1=", "2")
    assert talk.input_ids == (1, 5, 14, 5, 15, 6, 2)
    assert talk.loss_mask == (False,) * 5 + (True,) * 2
    assert set(talk.versions) == {-1}
    assert (talk.completion, talk.reply, talk.num_tokens) == ("2", "2", 2)


@pytest.mark.parametrize("text", ["12*3", "é"])
def test_unknown_characters_are_named(text: str) -> None:
    with pytest.raises(DataError, match=r"no token for '[*é]'"):
        characters().encode(text)


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_unknown_characters_of_messages_and_templates_are_named(template: str) -> None:
    """As those of a plain prompt, in a whole conversation, a prompt and the text after a turn."""
    wrong = [*TALK[:3], {"role": "assistant", "content": "4*"}]
    message = r"no token for '\*' \(in .*\); add it to the alphabet"
    with pytest.raises(DataError, match=message):
        characters(template).chat(wrong)
    with pytest.raises(DataError, match=message):
        characters(template).template().prompt(wrong)
    with pytest.raises(DataError, match=message):
        characters(template).template().continuation([{"role": "user", "content": "2*3"}], "<eos>")
    with pytest.raises(DataError, match="no token for '#'"):
        characters("#" + template).template().prompt(TALK)


def test_the_token_for_unknown_text_may_also_end_a_turn() -> None:
    """As in the vocabulary of GPT-2, whose templates name it."""
    tokenizer = characters(PLAIN)
    tokenizer.template()._tokenizer.unk_token = "<eos>"
    assert tokenizer.chat(TALK) == characters(PLAIN).chat(TALK)


def test_a_saved_tokenizer_loads_in_transformers(tmp_path: Path) -> None:
    tokenizer = characters(PLAIN)
    tokenizer.save(str(tmp_path))
    again = TextTokenizer(TokenizerSettings(path=str(tmp_path)))
    plain = AutoTokenizer.from_pretrained(tmp_path)
    text = "12+30 = 42\n"
    assert plain(text, add_special_tokens=False)["input_ids"] == again.encode(text) == tokenizer.encode(text)
    assert again.decode(again.encode(text)) == text
    assert (again.prefix_ids, again.stop_ids) == ((1,), (2,))
    assert again.chat(TALK) == tokenizer.chat(TALK)
    with pytest.raises(DataError, match="no token for"):
        again.encode("*")


def test_a_saved_tokenizer_stays_one_beside_a_models_config(tmp_path: Path) -> None:
    """Transformers would load it as that of the model's family, which drops unknown characters."""
    characters().save(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    saved = TextTokenizer(TokenizerSettings(str(tmp_path)))
    assert saved.encode("12 ab") == characters().encode("12 ab")
    with pytest.raises(DataError, match="no token for 'Z'"):
        saved.encode("1Z")
    assert [saved.decode_token(token) for token in (2, 5)] == ["<eos>", "1"]


def test_other_programs_begin_prompts_with_bos(tmp_path: Path) -> None:
    characters().save(str(tmp_path))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded("12")["input_ids"] == characters().encode_prompt("12")


def test_an_alphabet_is_used_if_the_checkpoint_has_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert TextTokenizer(TokenizerSettings(str(tmp_path), ALPHABET)).encode("0") == [4]
    characters().save(str(tmp_path))
    assert TextTokenizer(TokenizerSettings(str(tmp_path), "ab")).encode("0") == [4]


def test_the_generation_config_adds_stop_tokens(tmp_path: Path) -> None:
    characters().save(str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    assert TextTokenizer(TokenizerSettings(path=str(tmp_path))).stop_ids == (2, 3)


def test_every_file_of_a_checkpoint_may_name_stop_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": 263}')
    tokenizer = byte_tokenizer(tmp_path)
    assert tokenizer.stop_ids == (tokenizer.encode("</s>")[0], 263)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258], "temperature": 0.6}')
    tokenizer = TextTokenizer(TokenizerSettings(path=str(tmp_path)))
    assert tokenizer.stop_ids == (257, 258, 263)
    tokenizer.save_stop_ids(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved == {"eos_token_id": [257, 258, 263], "temperature": 0.6}
    assert TextTokenizer(TokenizerSettings(path=str(tmp_path))).stop_ids == tokenizer.stop_ids
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": "</s>"}')
    with pytest.raises(DataError, match=r"config.json: eos_token_id is '</s>'; it must be a token's id"):
        TextTokenizer(TokenizerSettings(path=str(tmp_path)))


@pytest.mark.parametrize("kept", ['{"eos_token_id": 257, "top_k": 20}', '{\n"eos_token_id": [257] }'])
def test_a_generation_config_with_all_stop_tokens_is_not_written(kept: str, tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    tokenizer = byte_tokenizer(tmp_path)
    file.write_text(kept)
    tokenizer.save_stop_ids(tmp_path)
    assert file.read_text() == kept
    file.rename(tmp_path / "config.json")
    tokenizer.save_stop_ids(tmp_path)
    assert not file.exists()


def test_special_tokens_that_belong_to_an_answer_are_in_its_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": 263}')
    tokenizer = byte_tokenizer(tmp_path)
    text = '<think>é</think>ok <tool_call>{"name": "f"}</tool_call>'
    for end in ("", "</s>", "<|im_end|>", "</s><pad><pad>"):
        assert tokenizer.decode_answer(tokenizer.encode(text + end)) == text


@pytest.mark.parametrize("template", [PLAIN, TAGGED])
def test_chat_learns_only_the_assistants_tokens(template: str) -> None:
    tokenizer = characters(template)
    talk = tokenizer.chat(TALK)
    learned = [i for i, flag in zip(talk.input_ids, talk.loss_mask, strict=True) if flag]
    assert learned == [*tokenizer.encode("two"), 2, *tokenizer.encode("four"), 2]
    assert tokenizer.decode(talk.input_ids) == "[user]one\n[assistant]two\n[user]three\n[assistant]four\n"
    assert (talk.completion, talk.num_turns, talk.messages) == ("four", 2, tuple(TALK))


def test_a_prompt_of_messages_opens_the_assistants_turn() -> None:
    tokenizer = characters(PLAIN)
    ids = tokenizer.template().prompt(TALK[:1])
    assert tokenizer.decode(ids) == "[user]one\n[assistant]"


@pytest.mark.parametrize(("last", "end"), [(2, []), (5, [2])])
def test_a_continuation_closes_the_turn_if_the_model_did_not(last: int, end: list[int]) -> None:
    tokenizer = characters(PLAIN)
    ended_with = tokenizer.turn_end([5, last])
    ids = tokenizer.template().continuation([{"role": "user", "content": "go on"}], ended_with)
    assert ids == [*end, *tokenizer.encode("\n[user]go on\n[assistant]")]


@pytest.mark.parametrize("named", [[], ["<think>", "</think>"]])
def test_another_server_replies_with_the_same_text(named: list[str], tmp_path: Path) -> None:
    """vLLM's leaves out special tokens, and its parsers look for some of them."""
    tokenizer = byte_tokenizer(tmp_path, CHATML)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "extra_special_tokens": named}))
    tokenizer = TextTokenizer(TokenizerSettings(str(tmp_path)))
    tokenizer.save_for_server(tmp_path / "server")
    served = AutoTokenizer.from_pretrained(tmp_path / "server")
    text = "<s><think>é</think> <tool_call>{}</tool_call></s><pad>"
    ids = served(text, add_special_tokens=False)["input_ids"]
    assert ids == tokenizer.encode(text)
    assert served("1")["input_ids"] == tokenizer.encode_prompt("1")
    assert served.decode(ids, skip_special_tokens=True) == tokenizer.decode_answer(ids)
    assert tokenizer.decode_answer(ids) == "<think>é</think> <tool_call>{}</tool_call>"
    assert (served.chat_template, served.eos_token, served.pad_token) == (CHATML, "</s>", "<pad>")


@pytest.mark.parametrize("end", ["<|im_end|>", "</s>", ""])
def test_the_end_of_a_turn_is_there_once(end: str, tmp_path: Path) -> None:
    """Also if it is a token that is not special: the template ends turns with `<|im_end|>`."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": 263}')
    tokenizer = byte_tokenizer(tmp_path, CHATML)
    turn = tokenizer.encode("two" + end)
    ids = tokenizer.template().continuation(TALK[2:3], tokenizer.turn_end(turn))
    whole = tokenizer.decode_with_special([*turn, *ids])
    left = end.removesuffix("<|im_end|>")
    assert whole == f"two{left}<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"


def test_a_stop_string_that_ends_turns_is_there_once() -> None:
    """As of a base model, which has no token for it."""
    tokenizer = characters(PLAIN.replace("<eos>", "[end]"))
    end = tokenizer.turn_end(tokenizer.encode("two[end]"), stops=["=", "[end]"])
    ids = tokenizer.template().continuation(TALK[2:3], end)
    assert tokenizer.decode_with_special(ids) == "\n[user]three\n[assistant]"


def test_a_template_without_an_end_of_turn_loses_no_text() -> None:
    """The turn's last token is removed in front of the new text only if it ends the turn."""
    template = characters("{% for m in messages %}{{ m.content }}{% endfor %}").template()
    ids = characters().encode("4")
    for end in ("4", characters().turn_end(ids), characters().turn_end(ids, stops=["4"])):
        assert template.continuation([{"role": "user", "content": "42"}], end) == characters().encode("42")


def test_errors_name_the_problem() -> None:
    with pytest.raises(RecipeError, match=r"not \(messages, None\); use tokenizer.chat\(messages\)"):
        characters().join([{"role": "user", "content": "1"}])  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no chat template"):
        characters().chat(TALK)
    with pytest.raises(DataError, match=r"rewrites earlier turns.*generation"):
        characters(STRIPPING).chat([*TALK, {"role": "user", "content": "five"}])
    with pytest.raises(DataError, match="rejects the messages: be kind"):
        characters("{{ raise_exception('be kind') }}").chat(TALK)
    for template in ("chat.jinja", "{% for m in messages %}{{ m.text }}{% endfor %}"):
        with pytest.raises(DataError, match="whatever the messages are, so every prompt would be equal"):
            characters(template)
    with pytest.raises(DataError, match="path of a checkpoint or an alphabet"):
        TextTokenizer(TokenizerSettings())
    with pytest.raises(DataError, match="holds no tokenizer"):
        TextTokenizer(TokenizerSettings(path="nowhere/at/all"))
    with pytest.raises(DataError, match="'a' twice"):
        TextTokenizer(TokenizerSettings(alphabet="aba"))


def peak_bytes() -> int:
    """The largest memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_text_that_no_model_could_read_is_refused_before_it_is_encoded(template: str | None):
    """Encoding takes 400 bytes a character: 4 GB for this text."""
    tokenizer = TextTokenizer(TokenizerSettings(alphabet="01", chat_template=template, max_tokens=1000))
    text, before = "1" * 10_000_000, peak_bytes()
    message = "characters has more tokens than the 1,000 that the model has positions for"
    talk = [{"role": "user", "content": text}, {"role": "assistant", "content": "1"}]
    if tokenizer.chat_template is None:
        with pytest.raises(BackendError, match=message):
            tokenizer.encode_prompt(text)
        for pair in ((text, "1"), ("1", text)):
            with pytest.raises(DataError, match=message):
                tokenizer.join(*pair)
    else:
        with pytest.raises(BackendError, match=message):
            tokenizer.template().prompt(talk[:1])
        with pytest.raises(DataError, match=message):
            tokenizer.chat(talk)
    assert peak_bytes() - before < 300 << 20
    assert len(tokenizer.encode("1" * 20_000)) == 20_000, "a body may shorten what it has encoded"


def test_text_of_few_tokens_is_encoded_whatever_its_length(tmp_path: Path):
    tokens = models.WordLevel({"<unk>": 0, "a" * 100: 1}, unk_token="<unk>")
    words = HfTokenizer(tokens)
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    tokenizer = TextTokenizer(TokenizerSettings(path=str(tmp_path), max_tokens=50))
    assert tokenizer.encode_prompt(("a" * 100 + " ") * 45) == [1] * 45
    with pytest.raises(BackendError, match="a text of 10,100 characters has more tokens than the 50"):
        tokenizer.encode_prompt("a " * 5050)


THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is defined and not enable_thinking %}"
    "[nothink]{% endif %}{% endif %}"
)


def test_variables_of_a_template() -> None:
    def prompt(**kwargs: object) -> str:
        settings = TokenizerSettings(alphabet=ALPHABET, chat_template=THINKING, template_kwargs=kwargs)
        tokenizer = TextTokenizer(settings)
        assert tokenizer.chat_template is not None
        return tokenizer.decode_with_special(
            tokenizer.chat_template.prompt([{"role": "user", "content": "one"}])
        )

    assert prompt() == prompt(enable_thinking=True) == "[user]one\n[assistant]"
    assert prompt(enable_thinking=False) == "[user]one\n[assistant][nothink]"
    message = "does not use the variable 'enable_thinkin' of template_kwargs; did you mean 'enable_thinking'"
    with pytest.raises(DataError, match=message):
        prompt(enable_thinkin=False)
    with pytest.raises(DataError, match="does not use the variable 'messages'"):
        prompt(messages=[])
    with pytest.raises(DataError, match="but the tokenizer has none"):
        TextTokenizer(TokenizerSettings(alphabet=ALPHABET, template_kwargs={"enable_thinking": False}))
