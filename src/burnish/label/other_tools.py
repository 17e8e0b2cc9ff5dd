"""The JSON exports of Label Studio's pairwise template and of Argilla's ranking question, as tasks and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from burnish.errors import UserError
from burnish.label.tasks import Answer, Task
from burnish.types import Message

Records = Sequence[tuple[str, Mapping[str, Any]]]
Given = tuple[Task, list[Answer]]

PAIRS = (
    ("answer1", "answer2"),
    ("text1", "text2"),
    ("response1", "response2"),
    ("answer_a", "answer_b"),
    ("response_a", "response_b"),
)
"""What the templates of Label Studio call the two texts, the left one first."""
PROMPTS = ("prompt", "instruction", "question", "input", "query")


def _said(role: str, text: Any, place: str, key: str) -> tuple[Message, ...]:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{place}: {key}: expected a text, got {type(text).__name__}")
    return ({"role": role, "content": text},)


def _prompt(columns: Mapping[str, Any], place: str) -> str:
    """The column of the prompt."""
    found = next((name for name in PROMPTS if name in columns), None)
    if found is None:
        raise UserError(f"{place}: no prompt: expected one of {', '.join(PROMPTS)}, got {', '.join(columns)}")
    return found


# --- Label Studio -------------------------------------------------------------------------------------------------


def is_label_studio(records: Records) -> bool:
    """Whether the records are the tasks of a JSON export of Label Studio."""
    return bool(records) and all(isinstance(r.get("data"), Mapping) and "annotations" in r for _, r in records)


def label_studio(records: Records) -> list[Given]:
    """The tasks of a JSON export, with the answers of its annotators.

    An annotation without a choice, or one that was cancelled, is read as skipped.

    Raises:
        UserError: a task has no prompt, or it is not known which texts are the left and the right one.
    """
    return [_label_studio_task(place, record) for place, record in records]


def _label_studio_task(place: str, record: Mapping[str, Any]) -> Given:
    data = {str(name): value for name, value in record["data"].items()}
    annotations = [annotation for annotation in record["annotations"] or () if isinstance(annotation, Mapping)]
    pairwise = [item for annotation in annotations for item in _choices(annotation)]
    named = [tuple(str(item.get("to_name", "")).split(",")) for item in pairwise]
    pair = next((pair for pair in (*named, *PAIRS) if len(pair) == 2 and all(name in data for name in pair)), None)
    if pair is None:
        known = " or ".join(" and ".join(pair) for pair in PAIRS)
        raise UserError(
            f"{place}: data: cannot tell the left text from the right one: expected columns that are named as in the "
            f"template's toName, or {known}; got {', '.join(data)}"
        )
    asked = _prompt(data, place)
    columns = {name: value for name, value in data.items() if name not in (asked, *pair)}
    prompt = _said("user", data[asked], place, asked)
    task = Task(prompt, tuple(_said("assistant", data[name], place, name) for name in pair), place, meta=columns)
    return task, [_label_studio_answer(task, annotation) for annotation in annotations]


def _choices(annotation: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    items = annotation.get("result") or ()
    return [item for item in items if isinstance(item, Mapping) and item.get("type") == "pairwise"]


def _label_studio_answer(task: Task, annotation: Mapping[str, Any]) -> Answer:
    by = annotation.get("completed_by")
    name = by.get("email") or by.get("id") if isinstance(by, Mapping) else by
    selected = [
        item["value"].get("selected") for item in _choices(annotation) if isinstance(item.get("value"), Mapping)
    ]
    ranks = {"left": (1, 2), "right": (2, 1)}.get(selected[-1]) if selected else None
    seconds = annotation.get("lead_time")
    return Answer(
        task.id,
        f"Label Studio: {name}",
        None if annotation.get("was_cancelled") else ranks,
        seconds=float(seconds) if isinstance(seconds, int | float) else None,
    )


# --- Argilla ------------------------------------------------------------------------------------------------------


def is_argilla(records: Records) -> bool:
    """Whether the records are those of a JSON export of Argilla."""
    return bool(records) and all(isinstance(r.get("fields"), Mapping) and "responses" in r for _, r in records)


def argilla(records: Records) -> list[Given]:
    """The tasks of an export with ``to_json``, with the answers of its users.

    The ranking question is the one whose options are called like the record's fields. Responses that were discarded are
    read as skipped, and drafts are not read.

    Raises:
        UserError: no question ranks fields of the records.
    """
    rankings = [[(q, *r) for q, *r in _responses(record) if _options(r[1], record["fields"])] for _, record in records]
    options = list(
        dict.fromkeys(
            name
            for (_, record), responses in zip(records, rankings, strict=True)
            for _, _, value, _ in responses
            for name in _options(value, record["fields"])
        )
    )
    if len(options) < 2:
        raise UserError(
            f"{records[0][0]}: no response ranks two of the record's fields, {', '.join(records[0][1]['fields'])}: "
            "the options of the ranking question must be called like the fields of the completions"
        )
    made = []
    for (place, record), responses in zip(records, rankings, strict=True):
        fields = {str(name): value for name, value in record["fields"].items()}
        shown = sorted((name for name in options if name in fields), key=list(fields).index)
        rest = [name for name in fields if name not in shown]
        asked = rest[0] if len(rest) == 1 else _prompt({name: fields[name] for name in rest}, place)
        columns = {name: fields[name] for name in rest if name != asked}
        completions = tuple(_said("assistant", fields[name], place, name) for name in shown)
        metadata = record.get("metadata") or {}
        task = Task(_said("user", fields[asked], place, asked), completions, place, meta={**metadata, **columns})
        answers = []
        for _, user, value, status in responses:
            ranked = _options(value, fields)
            if status != "draft" and set(ranked) == set(shown):
                ranks = None if status == "discarded" else tuple(ranked[name] for name in shown)
                answers.append(Answer(task.id, f"Argilla: {user}", ranks))
        made.append((task, answers))
    return made


def _responses(record: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, Any]]:
    """The question, user, value and status of each response, as Argilla 2 and as Argilla 1 write them."""
    responses = record["responses"] or {}
    if isinstance(responses, Mapping):
        for question, given in responses.items():
            for response in given or ():
                yield question, response.get("user_id"), response.get("value"), response.get("status")
        return
    for response in responses:
        for question, given in (response.get("values") or {}).items():
            yield question, response.get("user_id"), given.get("value"), response.get("status")


def _options(value: Any, fields: Mapping[str, Any]) -> dict[str, int]:
    """The rank of each field in a response, ``{"reply_2": 1, "reply_1": 2}``; {} if it does not rank fields.

    Argilla 2 lists the options from best to worst, and Argilla 1 gives each one its rank.
    """
    if not isinstance(value, list) or len(value) < 2:
        return {}
    called = {_plain(str(name)): str(name) for name in fields}
    ranks: dict[str, int] = {}
    for place, option in enumerate(value, start=1):
        name, rank = (option.get("value"), option.get("rank")) if isinstance(option, Mapping) else (option, place)
        if not isinstance(name, str) or not isinstance(rank, int) or _plain(name) not in called:
            return {}
        ranks[called[_plain(name)]] = rank
    return ranks


def _plain(name: str) -> str:
    """A name without case and punctuation: an option may be ``reply-1`` where the field is ``reply_1``."""
    return "".join(filter(str.isalnum, name)).lower()
