"""The options of an export, each defined once.

The fields of `ExportOptions` are the source of everything that names an option: the flags of
`modelexport export`, the fields of a batch job and their JSON Schema, the keywords of
`export_model` and `export_source`, the options that a file records for `verify`, and the tables of
the API page. To add an option, add a field here and use it where it takes effect.
"""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args, get_origin

import msgspec

from modelexport.errors import UnknownOptionError
from modelexport.exporters import EXPORTER_NAMES

StrPath = str | os.PathLike[str]
"""What a caller may pass as a path."""
PARAMETER_MODES = ("sidecar", "embedded", "reference")
"""Where a GraphML has the data of initializers: in a file beside it, inside it, in the model."""
KEEP_NAMESPACE: Literal["keep-namespace"] = "keep-namespace"
"""The value of `scrub` that gives each node a namespace made of its tag."""


class Spelling(msgspec.Struct, frozen=True, kw_only=True):
    """How an option is written, beyond what its name, type and default say."""

    flags: tuple[str, ...] = ()
    """The flags of the command line, where they are not derived from the name."""
    flag_help: str | None = None
    """The help of a flag that turns the option off; otherwise the description."""
    metavar: str | None = None
    """The placeholder of the value in the help."""
    choices: tuple[str, ...] = ()
    """The values that are allowed."""
    is_path: bool = False
    """Whether the value is the path of a file or folder."""
    aliases: tuple[str, ...] = ()
    """Earlier names, which keep working."""
    single: str | None = None
    """The key under which a value that is not a mapping is stored, where a mapping is expected."""
    for_source: bool = False
    """Whether it says how to load a model, and so has no meaning for a model object."""


def _option(description: str, **spelling: Any) -> msgspec.Meta:
    return msgspec.Meta(description=description, extra={"spelling": Spelling(**spelling)})


_source_option = functools.partial(_option, for_source=True)


class SourceOptions(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Where a model and its example inputs come from; recorded in the file, for `verify`."""

    task: Annotated[
        str | None, _source_option("Load the head for this task, for example text-classification.")
    ] = None
    model_class: Annotated[str | None, _source_option("Load this class of transformers.")] = None
    revision: Annotated[str | None, _source_option("Branch, tag or commit on the hub.")] = None
    random_weights: Annotated[
        bool, _source_option("Build from the configuration alone, without the weights.")
    ] = False
    input_text: Annotated[str | None, _source_option("Text for the model's tokenizer.")] = None
    input_shapes: Annotated[
        dict[str, tuple[int, ...]],
        _source_option(
            "Shape of the main input (1,128), or of an input by name.",
            flags=("--input-shape",),
            aliases=("input_shape",),
            single="",
        ),
    ] = {}
    input_specs: Annotated[
        str | None,
        _source_option("JSON that describes each input, or an .npz with arrays.", is_path=True),
    ] = None


class ExportOptions(
    SourceOptions,
    frozen=True,
    kw_only=True,
    gc=False,
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """Every option of an export, with its type, default and meaning."""

    strategy: Annotated[
        str,
        _option(
            "auto (dynamo, another exporter if it fails), fx (dynamo), htp or usage_based "
            "(torchscript), or a plugin's."
        ),
    ] = "auto"
    exporter: Annotated[
        str | None, _option("Override the strategy's exporter.", choices=EXPORTER_NAMES)
    ] = None
    fallback: Annotated[
        bool,
        _option(
            "With auto: continue with other exporters where dynamo fails.",
            flag_help="With auto: try only dynamo, and fail where it fails.",
        ),
    ] = True
    dynamic: Annotated[bool, _source_option("Make batch and sequence-like axes symbolic.")] = False
    dynamic_axes: Annotated[
        dict[str, dict[int, str]], _source_option("Symbolic axes by input, each with a name.")
    ] = {}
    generation: Annotated[
        bool,
        _source_option(
            "Export a language model as parts that generate text, with caches between them."
        ),
    ] = False
    max_cache_length: Annotated[
        int | None,
        _source_option("With --generation: the tokens that a cache of fixed size holds."),
    ] = None
    opset_version: Annotated[
        int | None, _option("ONNX opset; the exporter's default if left out.")
    ] = None
    trust_remote_code: Annotated[
        bool, _source_option("Run the code that comes with the model.")
    ] = False
    torch_nn_exceptions: Annotated[
        str | tuple[str, ...] | None,
        _option(
            "torch.nn classes to show in tags: a comma list, all or none.",
            flags=("--torch-nn",),
            metavar="NAMES",
            aliases=("torch_nn",),
        ),
    ] = None
    include: Annotated[
        str | tuple[str, ...] | None,
        _option("Show modules whose class or path matches (comma list).", metavar="GLOBS"),
    ] = None
    exclude: Annotated[
        str | tuple[str, ...] | None,
        _option("Hide modules whose class or path matches (comma list).", metavar="GLOBS"),
    ] = None
    max_depth: Annotated[int | None, _option("Greatest number of segments in a tag.")] = None
    optimize: Annotated[
        bool,
        _option(
            "Let the exporter optimise the graph.",
            flag_help="Turn the exporter's own optimisation off.",
        ),
    ] = True
    external_data: Annotated[
        bool | None,
        _option("Data of initializers beside the file, or inside it; by its size if left out."),
    ] = None
    clean: Annotated[
        bool,
        _option(
            "Write the baseline's bytes and only the sidecar.",
            flags=("--clean", "--no-hierarchy-attrs"),
        ),
    ] = False
    scrub: Annotated[
        bool | Literal["keep-namespace"],
        _option(
            "Leave out torch's own metadata: stack traces, paths, source lines. With "
            "keep-namespace nodes keep a namespace, made of their tags, for Model Explorer.",
            choices=(KEEP_NAMESPACE,),
        ),
    ] = False
    with_graphml: Annotated[
        bool, _option("Also write a GraphML for yEd, <stem>_hierarchical_graph.graphml.")
    ] = False
    graphml_output: Annotated[
        str | None, _option("Also write a GraphML for yEd, to this file.", is_path=True)
    ] = None
    graphml_parameters: Annotated[
        str,
        _option(
            "Where the GraphML has the data of initializers: beside it in an .onnxdata, inside it, "
            "or in the model itself.",
            choices=PARAMETER_MODES,
        ),
    ] = PARAMETER_MODES[0]
    with_view: Annotated[bool, _option("Also write a page to look at, <stem>.html.")] = False
    with_report: Annotated[bool, _option("Also write a report, <stem>_report.md.")] = False
    flops: Annotated[
        bool,
        _option(
            "Count the floating-point operations of each module, in one more run of the model."
        ),
    ] = False
    jit_graph: Annotated[
        str | None, _option("Also write the TorchScript graph to this file.", is_path=True)
    ] = None
    fx_graph: Annotated[
        str | None, _option("Also write the FX program to this file.", is_path=True)
    ] = None
    temp_dir: Annotated[str | None, _option("Folder for temporary files.", is_path=True)] = None


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Further keywords of `export_model`, which only Python code can give."""

    input_names: Annotated[
        Sequence[str] | None,
        _option("Names of the graph's inputs; keyword inputs keep theirs without it."),
    ] = None
    output_names: Annotated[
        Sequence[str] | None,
        _option("Names of the graph's outputs; those of a mapping keep theirs without it."),
    ] = None
    dynamic_shapes: Annotated[Any, _option("Symbolic axes, as torch.onnx.export takes them.")] = (
        None
    )
    on_step: Annotated[
        Callable[[str], None] | None, _option("Called with the name of each step as it begins.")
    ] = None
    source: Annotated[str | None, _option("Recorded as the name of the model's source.")] = None
    inputs_from: Annotated[str | None, _option("Recorded as the origin of the inputs.")] = None
    source_options: Annotated[
        SourceOptions | None, _option("Recorded for verify, to load the same model again.")
    ] = None
    seed: Annotated[int | None, _option("Recorded as the seed of random inputs.")] = None
    part: Annotated[
        str | None, _option("Recorded as the part of a language model that the file is.")
    ] = None


class Option(NamedTuple):
    """One field of a record of options."""

    name: str
    type: Any
    default: Any
    description: str
    spelling: Spelling


@functools.cache
def options_of(record: type[msgspec.Struct]) -> tuple[Option, ...]:
    """Return the options that a record defines, its own before those of the source.

    Fields of a subclass that are not options are left out.
    """
    options = []
    for field in msgspec.structs.fields(record):
        if get_origin(field.type) is Annotated:
            kind, meta = get_args(field.type)
            default = None if field.default is msgspec.NODEFAULT else field.default
            spelling = meta.extra["spelling"]
            options.append(Option(field.name, kind, default, meta.description, spelling))
    return tuple(sorted(options, key=lambda option: option.spelling.for_source))


def flags_of(option: Option) -> tuple[str, ...]:
    """Return the flags of an option on the command line, the first one being its name there."""
    dashed = option.name.replace("_", "-")
    if option.type is bool and option.default:  # a flag that turns it off
        return (f"--no-{dashed}",)
    if option.type == bool | None:
        return (f"--{dashed}/--no-{dashed}",)
    return option.spelling.flags or (f"--{dashed}",)


def recorded_options(options: ExportOptions) -> SourceOptions:
    """Return what a file records of the options: those of the source."""
    # A path of this machine has no meaning elsewhere, and must not leak into the file.
    specs = None if options.input_specs is None else os.path.basename(options.input_specs)
    fields = {name: getattr(options, name) for name in SourceOptions.__struct_fields__}
    return SourceOptions(**{**fields, "input_specs": specs})


MODEL_KEYWORDS = (
    *(option for option in options_of(ExportOptions) if not option.spelling.for_source),
    *options_of(CallOptions),
)
"""What `export_model` accepts: no option that says how to load a model."""
SOURCE_KEYWORDS = options_of(ExportOptions)
"""What `export_source`, the command line and a batch job accept."""


def resolve_names(
    given: Mapping[str, Any], known: Iterable[Option], also: Iterable[str] = ()
) -> dict[str, Any]:
    """Return options under their present names, with paths as text and a single shape by name.

    Args:
        given: The options by name or alias.
        known: The options that are accepted.
        also: Further names that are accepted, and passed on as they are.

    Returns:
        The options by field name.

    Raises:
        UnknownOptionError: A name is not known, or one option is given under two names.
    """
    options = {name: option for option in known for name in (option.name, *option.spelling.aliases)}
    resolved: dict[str, Any] = {}
    for given_name, value in given.items():
        option = options.get(given_name)
        if option is None and given_name not in also:
            raise UnknownOptionError(
                f"there is no option {str(given_name)[:80]!r}",
                hint=_suggest(str(given_name), [*options, *also]),
            )
        name = given_name if option is None else option.name
        if name in resolved:
            raise UnknownOptionError(
                f"{name} is given twice", hint=f"{given_name} is another name of it"
            )
        resolved[name] = value if option is None else _plain_value(value, option.spelling)
    return resolved


def _suggest(name: str, known: Sequence[str]) -> str:
    if any(name in (option.name, *option.spelling.aliases) for option in SOURCE_KEYWORDS):
        return "it says how to load a model: use export_source"
    plain = name.replace("-", "_")
    similar = [one for one in known if plain in one] or difflib.get_close_matches(plain, known, 1)
    return f"did you mean {similar[0]}?" if similar else f"known: {', '.join(sorted(known))}"


def _plain_value(value: Any, spelling: Spelling) -> Any:
    if spelling.is_path and isinstance(value, os.PathLike):
        return os.fspath(value)
    if spelling.single is not None and not isinstance(value, Mapping):
        return {spelling.single: value}
    return value


_P = ParamSpec("_P")
_R = TypeVar("_R")


def keyword_aliases(**names: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function accept earlier names of its arguments as keywords.

    Args:
        **names: The present name of an argument by its earlier one.

    Returns:
        A decorator. The signature that type checkers and `help` see is the present one.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def accept_aliases(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            # A plain dict: a ParamSpec's keywords cannot be renamed under the eyes of mypy.
            keywords: dict[str, Any] = {names.get(name, name): kwargs[name] for name in kwargs}
            if len(keywords) < len(kwargs):
                twice = next(name for name in kwargs if name in names and names[name] in kwargs)
                raise UnknownOptionError(
                    f"{names[twice]} is given twice", hint=f"{twice} is another name of it"
                )
            return function(*args, **keywords)

        return accept_aliases

    return decorate
