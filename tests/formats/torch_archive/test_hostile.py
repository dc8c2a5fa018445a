"""Nothing in a file runs, whatever it says; what never belongs in a checkpoint is refused."""

from __future__ import annotations

import os
import pickle
import pickletools
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from reshard.errors import ArchiveError, HostileFileError
from reshard.formats.torch_archive import (
    Global,
    ObjectRecord,
    lay_out_archive,
    read_archive,
)
from tests.formats.torch_archive.handmade import (
    HOOKS,
    STORAGE,
    archive_bytes_at,
    named,
    read_pickle,
    stack_named,
    text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A file that every hostile pickle here would make if it ran; also watches `sys.modules`."""
    file = tmp_path / "ran"
    before = set(sys.modules)
    yield file
    assert not file.exists()
    grown = {name for name in set(sys.modules) - before if not name.startswith("_pytest")}
    assert not grown


FORMS = {
    "reduce": lambda call, arg: named(call) + text(arg) + b"\x85R",
    "stack global": lambda call, arg: stack_named(*call.split(" ")) + text(arg) + b"\x85R",
    "instance": lambda call, arg: (
        b"(" + text(arg) + b"i" + "\n".join(call.split()).encode() + b"\n"
    ),
    "object": lambda call, arg: b"(" + named(call) + text(arg) + b"o",
    "new object": lambda call, arg: named(call) + text(arg) + b"\x85\x81",
    "new object with keywords": lambda call, arg: named(call) + text(arg) + b"\x85}\x92",
    "never called": lambda call, arg: named(call) + b"0" + text(arg),
    "inside containers": lambda call, arg: b"]}" + text(arg) + b"](" + named(call) + b"esa",
    "in the memo only": lambda call, arg: named(call) + b"q\x000" + text(arg),
    "as a state": lambda call, arg: named("m C") + b")\x81}" + text(arg) + named(call) + b"sb",
    "as a key": lambda call, arg: b"}" + named(call) + text(arg) + b"s",
    "argument of a partial": lambda call, arg: (
        named("functools partial") + named(call) + text(arg) + b"\x86R"
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", ["os system", "posix system", "builtins eval", "__builtin__ exec"])
def test_hostile_global_is_refused_in_every_form(
    form: str, call: str, tmp_path: Path, canary: Path
) -> None:
    code = f"touch {canary}" if call.endswith("system") else f"open({str(canary)!r}, 'w')"
    with pytest.raises(HostileFileError) as caught:
        read_pickle(tmp_path, FORMS[form](call, code))
    name = call.split(" ")[1]
    assert name in str(caught.value)
    assert "handmade.pt" in str(caught.value)
    assert "\n" not in str(caught.value)


NAMES = [
    "os.popen",
    "os.execv",
    "os.environ",
    "os.path.join",
    "posixpath.join",
    "nt.system",
    "shutil.rmtree",
    "subprocess.Popen",
    "subprocess.check_output",
    "_posixsubprocess.fork_exec",
    "commands.getoutput",
    "popen2.popen3",
    "sys.exit",
    "sys.modules",
    "sys.settrace",
    "importlib.import_module",
    "importlib.util.find_spec",
    "imp.load_source",
    "runpy.run_path",
    "runpy._run_code",
    "pkgutil.resolve_name",
    "zipimport.zipimporter",
    "builtins.eval",
    "builtins.exec",
    "builtins.compile",
    "builtins.open",
    "builtins.__import__",
    "builtins.setattr",
    "builtins.delattr",
    "builtins.globals",
    "builtins.locals",
    "builtins.vars",
    "builtins.dir",
    "builtins.input",
    "builtins.breakpoint",
    "builtins.map",
    "builtins.filter",
    "builtins.memoryview",
    "builtins.super",
    "__builtin__.execfile",
    "__builtin__.file",
    "__builtin__.apply",
    "__builtin__.reduce",
    "__builtin__.reload",
    "io.open",
    "io.FileIO",
    "_io.open",
    "codecs.open",
    "_codecs.decode",
    "pickle.loads",
    "pickle.Unpickler",
    "_pickle.loads",
    "cPickle.loads",
    "marshal.loads",
    "shelve.open",
    "dill.loads",
    "dill._dill._create_function",
    "cloudpickle.loads",
    "cloudpickle.cloudpickle.make_skel_func",
    "joblib.load",
    "ctypes.CDLL",
    "ctypes.util.find_library",
    "cffi.FFI",
    "socket.socket",
    "_socket.socket",
    "ssl.SSLContext",
    "socketserver.TCPServer",
    "http.client.HTTPConnection",
    "urllib.request.urlopen",
    "urllib.urlopen",
    "requests.get",
    "httpx.get",
    "aiohttp.ClientSession",
    "ftplib.FTP",
    "smtplib.SMTP",
    "telnetlib.Telnet",
    "xmlrpc.client.ServerProxy",
    "paramiko.SSHClient",
    "webbrowser.open",
    "code.interact",
    "code.InteractiveInterpreter",
    "codeop.compile_command",
    "pdb.run",
    "bdb.Bdb",
    "cProfile.run",
    "profile.run",
    "timeit.timeit",
    "trace.Trace",
    "doctest.debug_script",
    "pydoc.pipepager",
    "unittest.main",
    "inspect.getsource",
    "ast.literal_eval",
    "types.FunctionType",
    "types.CodeType",
    "types.MethodType",
    "copyreg.add_extension",
    "copyreg.pickle",
    "operator.attrgetter",
    "operator.methodcaller",
    "operator.call",
    "_operator.attrgetter",
    "functools.reduce",
    "_functools.reduce",
    "functools.singledispatch",
    "itertools.starmap",
    "collections.namedtuple",
    "multiprocessing.Process",
    "multiprocessing.util.spawnv_passfds",
    "threading.Thread",
    "_thread.start_new_thread",
    "asyncio.create_subprocess_shell",
    "concurrent.futures.ThreadPoolExecutor",
    "signal.signal",
    "atexit.register",
    "gc.get_objects",
    "tempfile.mktemp",
    "glob.glob",
    "fileinput.input",
    "linecache.getline",
    "mmap.mmap",
    "pty.spawn",
    "fcntl.ioctl",
    "resource.setrlimit",
    "pip.main",
    "pip._internal.main",
    "setuptools.setup",
    "distutils.core.setup",
    "distutils.file_util.write_file",
    "ensurepip.bootstrap",
    "venv.create",
    "site.main",
    "sysconfig.get_config_vars",
    "platform.popen",
    "getpass.getpass",
    "logging.config.listen",
    "logging.config.dictConfig",
    "torch.load",
    "torch.save",
    "torch.compile",
    "torch.hub.load",
    "torch.hub._exec_with_module",
    "torch.jit.load",
    "torch.jit.unsupported_tensor_ops.execWrapper",
    "torch.package.PackageImporter",
    "torch.fx.graph_module.reduce_graph_module",
    "torch.ops.load_library",
    "torch.classes.load_library",
    "torch.utils.cpp_extension.load",
    "torch.utils.bottleneck.__main__.run_cprofile",
    "torch.utils.collect_env.run",
    "torch.serialization.load",
    "torch.storage._load_from_bytes",
    "torch.multiprocessing.spawn",
    "torch.distributed.rpc.rpc_sync",
    "torch.distributed.launcher.api.launch_agent",
    "torch._dynamo.guards.GuardBuilder.get",
    "torch._inductor.codecache.compile_file",
    "torch.testing._internal.common_utils.shell",
    "numpy.load",
    "numpy.fromfile",
    "numpy.memmap",
    "numpy.testing._private.utils.runstring",
    "numpy.f2py.compile",
    "numpy.distutils.exec_command",
    "pandas.read_pickle",
    "pandas.eval",
    "pandas.io.common.get_handle",
    "yaml.unsafe_load",
    "jinja2.Environment",
    "sympy.sympify",
    "numba.jit",
    "tensorflow.io.read_file",
    "keras.models.load_model",
    "six.moves.builtins.eval",
    "IPython.start_ipython",
    "pexpect.spawn",
    "transformers.dynamic_module_utils.get_class_from_dynamic_module",
    "deepspeed.ops.op_builder.builder.OpBuilder",
    "some.module.__globals__",
    "x.y.__class__",
]


@pytest.mark.parametrize("path", NAMES)
def test_globals_that_never_belong_in_a_checkpoint(path: str, tmp_path: Path) -> None:
    parts = path.split(".")
    # Where the module ends and the name begins is the author's choice.
    for cut in range(1, len(parts)):
        module, name = ".".join(parts[:cut]), ".".join(parts[cut:])
        with pytest.raises(ArchiveError) as caught:
            read_pickle(tmp_path, b"\x80\x04" + stack_named(module, name) + b".")
        assert isinstance(caught.value, HostileFileError), (module, name)
        assert parts[-1] in str(caught.value)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch", "os.system"),
        ("numpy.core", "sys.modules"),
        ("collections", "_sys.modules"),
        ("torch", "hub.load"),
        ("my_model", "subprocess"),
        ("my_model", "Net.forward.__globals__"),
        ("my_model", "Net.__init__"),
        ("my_model", "Net.__new__.__globals__"),
        ("builtins", "type.__new__"),
        ("my_model", "__builtins__"),
        ("logging", "os.popen"),
        ("deepspeed", "ops.op_builder.OpBuilder"),
    ],
)
def test_walks_to_a_hostile_place_are_refused(module: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(HostileFileError):
        read_pickle(tmp_path, b"\x80\x04" + stack_named(module, name) + b".")


@pytest.mark.parametrize(
    "pickled",
    [
        named("builtins getattr"),
        named("builtins getattr") + b"q\x000N",
        named("builtins getattr") + text("x") + text("y") + b"\x86R",
        named("builtins getattr") + named("m C") + text("__globals__") + b"\x86R",
        named("builtins getattr") + named("torch hub_") + text("os") + b"\x86R",
        named("builtins getattr") + named("m C") + b"\x85R",
        # One honest use does not cover for another one.
        b"(" + named("builtins getattr") + b"q\x00" + named("m C") + text("D") + b"\x86R]h\x00at",
        named("functools partial") + named("builtins getattr") + b"q\x00\x85R",
        named("builtins getattr") + named("os path") + text("join") + b"\x86R",
    ],
)
def test_getattr_is_refused_but_for_parts_of_a_class(pickled: bytes, tmp_path: Path) -> None:
    with pytest.raises(HostileFileError):
        read_pickle(tmp_path, pickled)


def test_getattr_of_a_class_is_a_name(tmp_path: Path) -> None:
    outer = named("__builtin__ getattr") + named("m C") + text("Inner") + b"\x86R"
    assert read_pickle(tmp_path, outer).root == Global("m", "C.Inner")
    member = named("deepspeed.runtime.zero.config ZeroStageEnum") + text("gradients") + b"\x86R"
    stage = read_pickle(tmp_path, named("__builtin__ getattr") + member).root
    assert isinstance(stage, ObjectRecord)
    assert stage.value == 2  # type: ignore[attr-defined]


def test_type_makes_no_classes(tmp_path: Path) -> None:
    with pytest.raises(HostileFileError, match="type"):
        read_pickle(tmp_path, named("builtins type") + text("X") + b")}\x87R")
    nothing = read_pickle(tmp_path, named("builtins type") + b"N\x85R").root
    assert isinstance(nothing, ObjectRecord)


@pytest.mark.parametrize(
    ("pickled", "what"),
    [
        (b"\x82\x01", "extension registry"),
        (b"\x83\x01\x00", "extension registry"),
        (b"\x84\x01\x00\x00\x00", "extension registry"),
        (b"\x97", "out-of-band"),
        (b"Psomething\n", "textual persistent id"),
        (b"K\x01Q", "persistent id"),
        (b"(X\x06\0\0\0moduleNtQ", "persistent id"),
        (b"K\x01)R", "calls something"),
        (b"])\x81", "calls something"),
        (b"K\x01K\x02b", "attributes"),
        (b"}}b", "attributes"),
        (named("m C") + b"}b", "attributes"),
        (b"K\x01K\x02a", "holds none"),
        (b"K\x01(K\x02e", "holds none"),
        (b"K\x01K\x02K\x03s", "holds none"),
        (b"]K\x01K\x02s", "holds none"),
        (b"}(K\x01u", "without a value"),
        (b"}]K\x01s", "at byte [0-9]: it uses a value where one of that kind cannot stand"),
        (named("m C") + b"]R", "not a tuple"),
        (named("collections OrderedDict") + b")R}" + text("items") + b"Nsb", "reserved"),
        (named("collections OrderedDict") + b")RK\x01b", "not a dict"),
        (b"\x81", "ends early"),
        (b"h\x07", "it takes a value that it never stored"),
        (b"X\xff\xff\xff\x7f", "ends early"),
        (b"T\xff\xff\xff\xff", "negative"),
        (b"\x8b\xff\xff\xff\xff", "negative"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff", "ends early"),
        (b"X\x01\0\0\0\xff", "it has a text that is not UTF-8"),
        (b"\xff", "unknown opcode"),
        (b"I12x\n", "at byte 2: a line of text that is no number"),
        (b"Fx1\n", "a line of text that is no number"),
        (b"S'abc\n", "quotes"),
        (b"cos path\n", "ends early"),
        (b"cno-name\nx\n", "not a Python name"),
        (b"cmod\nx y\n", "not a Python name"),
        (b"c\nx\n", "not a Python name"),
        (b"cm..n\nx\n", "not a Python name"),
        (b"K\x01K\x02\x93", "not text"),
        (named("m C") + b")K\x01\x92", "keyword"),
    ],
)
def test_what_no_pickler_writes_is_refused(pickled: bytes, what: str, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=what) as caught:
        read_pickle(tmp_path, pickled)
    assert "handmade.pt" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_pickle_of_a_newer_protocol_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="protocol 9"):
        read_pickle(tmp_path, b"\x80\x09N.")


class Reduced:
    """Would run a command when unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


class Popened(Reduced):
    """The same with a list of words and a keyword."""

    def __reduce__(self) -> tuple[object, ...]:
        return subprocess.Popen, (("touch", self.command),)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("kind", [Reduced, Popened])
def test_real_attacks_do_not_run(
    kind: type[Reduced], protocol: int, tmp_path: Path, canary: Path
) -> None:
    command = f"touch {canary}" if kind is Reduced else str(canary)
    nested = {"module": [{"weight": (1, {"x": kind(command)})}]}
    with pytest.raises(HostileFileError, match=r"system|Popen"):
        read_archive(
            archive_bytes_at(tmp_path / "attack.pt", pickle.dumps(nested, protocol=protocol))
        )


# -------------------------------------------------------------------------------- resources


ENOUGH = 5
"""Seconds of a slow processor for what is refused or read in time; repeated work takes far more."""


def _seconds(folder: Path, pickled: bytes) -> float:
    """Processor time of refusing a pickle."""
    start = time.process_time()
    with pytest.raises(ArchiveError):
        read_pickle(folder, pickled)
    return time.process_time() - start


def test_a_key_that_takes_forever_to_hash_is_refused(tmp_path: Path) -> None:
    pairs = b")" + b"2\x86" * 60
    assert _seconds(tmp_path, b"}" + pairs + b"Ns") < ENOUGH
    assert _seconds(tmp_path, named("builtins set") + b"](" + pairs + b"e\x85R") < ENOUGH
    assert _seconds(tmp_path, b"(" + pairs + b"\x91") < ENOUGH
    # Hashing nests in C: a deep tuple would overflow its stack.
    assert _seconds(tmp_path, b"}" + b")" + b"\x85" * 200_000 + b"Ns") < ENOUGH


def test_keys_that_collide_by_design_are_refused(tmp_path: Path) -> None:
    huge = (((1 << 61) - 1) * 12345).to_bytes(10, "little", signed=True)
    assert _seconds(tmp_path, b"}\x8a\x0a" + huge + b"Ns") < ENOUGH


def test_copies_draw_on_a_budget(tmp_path: Path) -> None:
    content = named("_codecs encode") + b"q\x00" + text("x" * 100_000) + b"q\x01" + text("latin1")
    once = b"h\x00h\x01h\x02\x86R"
    assert _seconds(tmp_path, b"(" + content + b"q\x02\x86R" + once * 1000 + b"l") < ENOUGH
    many = b"](" + b"N" * 100_000 + b"eq\x00"
    twice = named("torch Size") + b"q\x01" + many
    assert _seconds(tmp_path, b"(" + twice + b"h\x01h\x00\x85R" * 1000 + b"l") < ENOUGH


def test_work_is_not_repeated_for_what_is_shared(tmp_path: Path) -> None:
    """One large part that a few bytes name again and again, in every place that looks inside."""
    times = 3000
    keys = b"(" + b"K\x01" * 50_000 + b"tq\x00"
    assert _seconds(tmp_path, b"}(" + keys + b"Nh\x00N" * times + b"u") < ENOUGH
    state = b"}q\x00(" + b"".join(text(f"k{n}") + b"N" for n in range(20_000)) + b"u"
    attributes = named("collections OrderedDict") + b")R" + state + b"b" + b"h\x00b" * times
    assert _seconds(tmp_path, attributes) < ENOUGH
    keywords = state + named("m C") + b"q\x01)h\x00\x92" + b"h\x01)h\x00\x92" * times
    assert _seconds(tmp_path, b"(" + keywords + b"t") < ENOUGH
    fragment = named("deepspeed.utils.tensor_fragment fragment_address") + b"q\x01"
    good = state + b"(" + text("numel") + b"K\x01" + text("start") + b"K\x01u"
    many = b"(" + good + fragment + b"0" + b"h\x01)\x81h\x00b" * times + b"t"
    assert _seconds(tmp_path, many) < ENOUGH
    shared = b"](" + b"K\x01" * 50_000 + b"eq\x00"
    assert _seconds(tmp_path, b"(" + shared + b"h\x00" * times + b"t") < ENOUGH
    read_pickle(tmp_path, b"(" + shared + b"h\x00" * 30 + b"t")


def test_nested_sets_are_put_in_order_once(tmp_path: Path) -> None:
    members = b"(N\x91"
    for number in range(60):
        members = b"(" + members + b"K" + bytes((number,)) + b"\x91"
    start = time.process_time()
    lay_out_archive(read_pickle(tmp_path, members).root, "nested")
    assert time.process_time() - start < ENOUGH


def test_deep_and_cyclic_trees_are_refused(tmp_path: Path) -> None:
    for pickled in (
        b"]" * 5000 + b"a" * 4999,
        b")" + b"\x85" * 5000,
        b"]q\x00h\x00a",
        b"}q\x00N]h\x00asq\x01",
        # Built from the inside, one level after the other, without a deep stack.
        b"]" + b"q\x000]h\x00a" * 5000,
    ):
        assert _seconds(tmp_path, pickled) < ENOUGH


LAUGHS = {
    "tuples": b")" + b"2\x86" * 60,
    "lists": b"]" + b"q\x00](h\x00h\x00e" * 60,
    "dicts": b"}" + (b"q\x00}(" + text("a") + b"h\x00" + text("b") + b"h\x00u") * 60,
    "in a record": named("m C") + b")\x81}" + text("x") + b")" + b"2\x86" * 60 + b"sb",
    "in a chain of records": (
        named("m C") + b"q\x000)" + b"2\x86" * 60 + (b"q\x01h\x00h\x01\x85\x81") * 300
    ),
    "one long text": text("x" * 1_000_000) + b"q\x00](" + b"h\x00" * 1000 + b"e",
    "around a tensor": (
        named("torch._tensor _rebuild_from_type_v2")
        + b"("
        + named("torch._utils _rebuild_tensor_v2")
        + named("torch Tensor")
        + b"("
        + STORAGE
        + b"K\0K\x04\x85K\x01\x85\x89"
        + HOOKS
        + b"t}"
        + text("ds")
        + b")"
        + b"2\x86" * 60
        + b"stR"
    ),
}
"""Trees that are small in the file and astronomically large when written out."""


@pytest.mark.parametrize("kind", LAUGHS)
def test_a_tree_is_as_large_as_its_file(kind: str, tmp_path: Path) -> None:
    """So that whoever compares or shows a part of it with Python's own means comes to an end."""
    start = time.process_time()
    with pytest.raises(ArchiveError, match="nested in a way that no checkpoint is"):
        read_pickle(tmp_path, LAUGHS[kind])
    assert time.process_time() - start < ENOUGH


def test_a_record_may_hold_itself(tmp_path: Path) -> None:
    record = read_pickle(tmp_path, named("m C") + b")\x81q\x00}" + text("me") + b"h\x00sb").root
    assert isinstance(record, ObjectRecord)
    assert record.fields["me"] is record
    assert len(repr(record)) < 500


BALLOONS = {
    "sets": b"\x8f" * 8_000_000,
    "marks": b"(" * 8_000_000,
    "lists": b"]" * 8_000_000,
    "tuples": b"(" + b"N\x85" * 8_000_000 + b"t",
    "records": named("m C") + b"q\x00(" + b"h\x00)R" * 3_000_000 + b"t",
    "dicts of one entry": b"(" + b"}NNs" * 3_000_000 + b"t",
    "a memo that is out of order": b"N"
    + b"".join(b"r" + (9 * n).to_bytes(4, "little") for n in range(1, 4_000_000)),
}
"""A few megabytes of opcodes that each make an object of a hundred bytes."""

_GROWN = """
import resource, sys
from reshard.errors import ArchiveError
from reshard.formats.torch_archive import read_archive
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_archive(sys.argv[1])
except ArchiveError as error:
    print(error.what)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("kind", BALLOONS)
def test_a_small_file_takes_little_memory(kind: str, tmp_path: Path) -> None:
    path = archive_bytes_at(tmp_path / "handmade.pt", b"\x80\x02" + BALLOONS[kind] + b".")
    run = [sys.executable, "-c", _GROWN, str(path)]
    told, grown = subprocess.run(run, capture_output=True, check=True, text=True).stdout.split(
        "\n", 1
    )
    assert told.startswith("the pickle makes far more of its bytes than any checkpoint does")
    assert int(grown) < 700 << 10


def test_numbers_of_many_digits_are_refused(tmp_path: Path) -> None:
    huge = b"\x7f" * 2000
    assert _seconds(tmp_path, b"\x8b" + len(huge).to_bytes(4, "little") + huge) < ENOUGH
    assert _seconds(tmp_path, b"L" + b"9" * 500_000 + b"L\n") < ENOUGH
    assert _seconds(tmp_path, b"I" + b"9" * 5000 + b"\n") < ENOUGH


def test_every_opcode_is_either_read_or_refused_by_name(tmp_path: Path) -> None:
    for opcode in pickletools.opcodes:
        with pytest.raises(ArchiveError) as caught:
            read_pickle(tmp_path, opcode.code.encode("latin1") + b"\0" * 12)
        # What follows the opcode is the only unknown one.
        line = str(caught.value)
        assert "unknown opcode 0x00" in line or "unknown opcode" not in line
