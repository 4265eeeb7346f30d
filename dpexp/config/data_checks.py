"""Do the settings of data make sense together: files, columns, classes, users, what is generated? `checks` asks it."""

from __future__ import annotations

from collections.abc import Iterator

from dpexp.schemas import RunConfig


def data_problems(run: RunConfig) -> Iterator[str]:
    """Name every problem of data, whatever they are used for: a training, or teachers."""
    for part in (_data, _dev, _generation, _images):
        yield from part(run)


def unit_problems(run: RunConfig) -> Iterator[str]:
    """Name every problem of users as the unit of privacy."""
    unit, data = run.unit, run.data
    sources = [f"unit.{name}" for name in ("column", "file", "size") if getattr(unit, name)]
    if unit.name == "example":
        if sources:
            yield f"{sources[0]} says who the users are, and unit=example protects single examples: choose unit=user"
        return
    if len(sources) != 1:
        given = f"{' and '.join(sources)} are given" if sources else "nothing says who they are"
        yield (
            f"unit=user, and {given}: give one of unit.column=NAME (a column of data.train), unit.file=FILE (a name in the line "
            "of each training row) and unit.size=K (made-up users of K rows each)"
        )
    if unit.column and data.train is None:
        yield f"unit.column={unit.column} is a column of data.train, which is not given: give it, or unit.file=FILE"
    if unit.column and run.task.kind == "image_classification":
        yield f"unit.column={unit.column}: images have no columns; give unit.file=FILE, a name in the line of each image"
    if unit.file and run.task.held_out:
        yield (
            f"unit.file says nothing of the {run.task.held_out} rows that task.held_out measures on: they may be of users who "
            "are trained on, too, and nothing protects them. Use unit.column, or give a file of other users as data.dev"
        )
    if run.clip.private and sources and not unit.size and unit.num_users is None:
        yield (
            "unit.num_users is not given: the number of users is public and fixes the guarantee, so declare it as you know it "
            "without looking at the rows (clip=nonprivate counts it)"
        )
    if run.task.augmentations:
        yield f"unit=user and task.augmentations={run.task.augmentations} both say what rows one loss is the mean of: set it to 0"
    if run.runtime.parallel == "pipeline":
        yield "unit=user needs all rows of a user in one place: choose another runtime than pipeline"
    if run.clip.method == "microbatch":
        yield f"clip={run.clip.name} clips means of several users together: use clip=flat, perlayer or fedavg"


def prompt_problems(run: RunConfig) -> Iterator[str]:
    """Name what is wrong with pairs of the private training data that stand in every prompt."""
    shots = run.task.generation.shots
    if shots and run.optim.steps != 0:
        yield (
            f"task.generation.shots={shots} puts training pairs into the prompt as they are, which is not private "
            "and no training: set optim.epochs=null optim.steps=0"
        )
    if shots and run.privacy.release == "strict":
        yield (
            f"task.generation.shots={shots} makes texts and metrics of private pairs, without noise, and privacy.release=strict "
            "is for what may be shown to anybody: leave one of them out"
        )


def _data(run: RunConfig) -> Iterator[str]:
    own = run.data.train is not None
    published = bool(run.task.files or run.task.hub_id)
    if own and not published and run.clip.private and (undeclared := list(_undeclared(run))):
        yield (
            f"data.train is private, so what is public about it is declared and not read from it: give "
            f"{' and '.join(undeclared)} as you know them without looking at the rows (clip=nonprivate reads them from the file)"
        )
    for name in ("train", "dev", "root"):
        if getattr(run.data, name) == "":
            yield f"data.{name}= is empty: give a file or a folder, or leave it out"
    own_rows = own and run.task.kind not in ("image_classification", "custom")
    columns = [
        run.data.text or run.task.text,
        run.data.text_pair or run.task.text_pair,
        run.data.label or run.task.label,
    ]
    if own_rows and len(set(columns)) < len(columns):
        named = ", ".join(filter(None, columns))
        yield f"data.text, data.text_pair and data.label name one column twice ({named}): give each its own"
    if blank := [label for label in run.task.labels if not label.strip()]:
        yield f"task.labels={list(run.task.labels)} has {len(blank)} empty names: every class needs one"
    if len(set(run.task.labels)) < len(run.task.labels):
        yield f"task.labels={list(run.task.labels)} names a class twice: name each once"
    if own and run.data.source in ("hub", "demo"):
        yield f"data.train is given, and data.source={run.data.source} would not read it: drop one of the two"
    for name, place in (("train", run.data.train), ("dev", run.data.dev)):
        if place is not None and "://" in place:
            yield (
                f"data.{name}={place} is an address, and files are read from this machine: download it first. Of a data set of "
                f'the hub datasets.load_dataset(NAME, split="...").save_to_disk("rows") makes a folder for data.{name}=rows'
            )
    if own and published:
        yield (
            f"data.train is given, but task={run.task.name} reads its own files: use task=text_classification (or "
            "another task that has no files), or point data.root at a folder in the published layout"
        )
    if run.scale.name not in run.task.num_examples:
        scales = ", ".join(sorted(run.task.num_examples))
        yield f"task={run.task.name} declares no number of examples for scale={run.scale.name} (it does for: {scales})"


def _undeclared(run: RunConfig) -> Iterator[str]:
    """Name the settings that declare what the task would have to read from the private training file."""
    if run.data.num_examples is None:
        yield "data.num_examples=N (the number of rows)"
    if run.task.kind not in ("generation", "custom") and not run.task.labels and not run.task.label_words:
        yield "task.labels=[a,b] (the classes, as they stand in the file)"


def _dev(run: RunConfig) -> Iterator[str]:
    """Ask whether there is a dev set where something goes by it, and not two of them."""
    data, held_out = run.data, run.task.held_out
    there = data.dev or run.task.files.get("dev")
    if held_out and there:
        yield f"task.held_out={held_out} makes rows of the training file the dev set, and there is one ({there}): set it to 0"
    if data.train is None or there or held_out or run.task.kind == "custom":
        return
    uses = {
        "optim.keep_best_every": run.optim.keep_best_every > 0,
        f"schedule={run.schedule.name}": run.schedule.name == "validation",
        f"clip={run.clip.name}": run.clip.method in ("ellipsoid", "embedding"),
    }
    for what in [name for name, used in uses.items() if used]:
        yield f"{what} goes by the dev set, which is public, and none is given: give data.dev, or leave it out"


def _generation(run: RunConfig) -> Iterator[str]:
    settings = run.task.generation
    if settings.top_p is not None and not 0 < settings.top_p <= 1:
        yield f"task.generation.top_p={settings.top_p} must be above 0 and at most 1"
    if unknown := [split for split in settings.splits if split not in ("dev", "test")]:
        yield f"task.generation.splits={list(settings.splits)} has {unknown[0]}: text is generated for dev and test alone"
    if not -100 <= settings.length_penalty <= 100:
        yield f"task.generation.length_penalty={settings.length_penalty:g} must be a power between -100 and 100"
    if settings.candidates == 1:
        yield "task.generation.candidates=1 leaves nothing to choose from: give 2 or more (ConvAI2 has 20), or 0"
    if settings.speakers and settings.shots:
        yield (
            f"task.generation.shots={settings.shots} puts pairs as plain text into the prompt, where task.generation.speakers "
            "has tokens: leave one of them out"
        )


def _images(run: RunConfig) -> Iterator[str]:
    for name in ("mean", "std"):
        values = list(getattr(run.task, name))
        if run.task.kind == "image_classification" and len(values) not in (0, 1, run.task.channels):
            yield f"task.{name}={values} must be {run.task.channels} numbers, one for each of task.channels, or one for all"
