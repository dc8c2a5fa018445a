"""Which globals a checkpoint may name.

Theory. No global is ever imported here, so a hostile one can do nothing to reshard. It is refused
all the same: what a checkpoint holds is passed on, and whoever loads the output with ``torch.load``
would run it. Three kinds of name are told apart.

*Refused*: modules whose classes and functions reach the operating system, the interpreter or other
files; single functions of this kind in modules that are otherwise harmless; and names that walk
through attributes to such a module (``x.os.system``) or to the inside of objects (``__globals__``).

*Restricted*: modules of which a few names are harmless and common, such as ``builtins`` and
``functools``; any other name in them is refused.

*Open*: everything else. A class of a training script or of a library is an inert record.

A list of names can never be complete; that is why nothing runs, rather than this being what keeps a
reader safe. Kinds were collected from the modules of the standard library and from published
attacks on pickles.
"""

from __future__ import annotations

import builtins
import re

from reshard.errors import ArchiveError, HostileFileError
from reshard.formats.torch_archive.values import short_repr


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_REFUSED_MODULES = _names(
    """
    os posix nt posixpath ntpath os2emxpath nturl2path shutil tempfile glob
    fileinput linecache filecmp mmap fcntl resource termios tty pty pwd grp spwd crypt syslog
    msvcrt winreg _winreg winsound _winapi select selectors signal subprocess _posixsubprocess
    commands popen2 multiprocessing _multiprocessing concurrent threading _thread thread
    _dummy_thread dummy_thread asyncio sched sys _imp imp importlib _frozen_importlib
    _frozen_importlib_external pkgutil pkg_resources zipimport zipapp runpy site sitecustomize
    usercustomize sysconfig platform gc atexit faulthandler tracemalloc ctypes _ctypes cffi
    _cffi_backend pickle _pickle cPickle pickletools marshal shelve dbm dill cloudpickle joblib
    jsonpickle yaml code codeop compileall py_compile ast symtable dis inspect tokenize pdb bdb
    trace cProfile profile timeit doctest pydoc unittest test lib2to3 idlelib turtledemo
    antigravity this webbrowser socket _socket socketserver ssl http urllib urllib2 urllib3
    httplib ftplib smtplib smtpd smtpserver poplib imaplib nntplib telnetlib xmlrpc xmlrpclib
    cgi cgitb wsgiref requests httpx aiohttp websocket websockets paramiko fabric pexpect
    ptyprocess sh plumbum invoke envoy delegator boto3 botocore s3fs gcsfs fsspec rpyc pip
    setuptools distutils ensurepip venv virtualenv easy_install numba llvmlite sympy jinja2 mako
    IPython ipykernel jupyter_client nbformat tensorflow keras tarfile zipfile gzip bz2 lzma
    sqlite3 readline rlcompleter getpass cmd curses tkinter turtle ensurepip six.moves future
    past _codecs_ext
    """
)
"""Modules none of whose names belongs in a checkpoint, with all their submodules."""

_REFUSED_SUBMODULES = _names(
    """
    logging.config logging.handlers numpy.testing numpy.f2py numpy.distutils numpy.ctypeslib
    numpy.lib.npyio numpy.lib._npyio_impl numpy.compat numpy._pytesttester pandas.io
    pandas.core.computation pandas.compat torch.hub torch.jit torch.package torch.fx torch.onnx
    torch.compiler torch.testing torch.ops torch._ops torch.classes torch._classes
    torch.multiprocessing torch.utils.cpp_extension torch.utils.model_zoo torch.utils.bottleneck
    torch.utils.collect_env torch.utils.benchmark torch.utils.data.datapipes
    torch.utils.file_baton torch.utils._cpp_extension_versioner torch.utils.show_pickle
    torch._inductor torch._dynamo torch._export torch._appdirs torch.distributed.rpc
    torch.distributed.run torch.distributed.launch torch.distributed.launcher
    torch.distributed.elastic torch.distributed.nn.jit torch.serialization torch._utils_internal
    transformers.utils.hub transformers.dynamic_module_utils deepspeed.ops.op_builder
    deepspeed.launcher deepspeed.autotuning deepspeed.env_report
    """
)
"""The same for submodules of packages that are otherwise open."""

_REFUSED_NAMES = _names(
    """
    collections.namedtuple dataclasses.make_dataclass typing.get_type_hints
    enum._make_class_unpicklable itertools.starmap weakref.finalize contextlib.ExitStack
    reprlib.recursive_repr numpy.load numpy.save numpy.savez numpy.loadtxt numpy.savetxt
    numpy.genfromtxt numpy.fromfile numpy.memmap numpy.open_memmap numpy.fromregex
    numpy.apply_along_axis numpy.vectorize numpy.frompyfunc numpy.piecewise numpy.fromfunction
    pandas.eval pandas.read_pickle pandas.read_csv pandas.read_json pandas.read_hdf
    pandas.read_sql torch.load torch.save torch.compile torch.import_ir_module
    torch.import_ir_module_from_buffer torch.from_file torch.storage._load_from_bytes
    torch._utils._import_dotted_name torch._C._load_for_lite_interpreter
    torch._C.import_ir_module torch.utils.data._utils.worker._worker_loop
    torch.storage._share_fd_cpu safetensors.torch.load_file random._urandom random._os
    uuid._load_system_functions
    """
)
"""Single names in open modules."""

_HARMLESS_BUILTINS = _names(
    """
    object.__new__ set frozenset complex slice range bytearray bytes object list dict tuple int
    float str bool type Ellipsis NotImplemented enumerate zip reversed iter abs all any ascii
    bin callable chr divmod format getattr hash hex id isinstance issubclass len max min oct ord
    pow print repr round sorted sum
    """
)
"""``getattr`` is among them to name a part of a class and for nothing else; see `construction`."""

_BUFFERS = frozenset(("BytesIO", "StringIO"))

_RESTRICTED = {
    "builtins": _HARMLESS_BUILTINS
    | {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    },
    "_codecs": frozenset(("encode",)),
    "codecs": frozenset(("encode",)),
    "copyreg": frozenset(("_reconstructor", "__newobj__", "__newobj_ex__")),
    # `or_` makes combined members of flag enums (Python 3.11), `getitem` generic types.
    "operator": frozenset(("or_", "getitem", "itemgetter")),
    "_operator": frozenset(("or_", "getitem", "itemgetter")),
    "functools": frozenset(("partial",)),
    "_functools": frozenset(("partial",)),
    # Layers keep their extra state in a buffer, which Python pickles by the first of these names.
    "_io": _BUFFERS,
    "io": _BUFFERS,
    "signal": frozenset(("Signals", "Handlers", "Sigmasks")),
    "types": frozenset(("SimpleNamespace", "MappingProxyType", "NoneType", "GenericAlias")),
    "torch.serialization": frozenset(("_get_layout",)),
}
"""Modules of which only these names are harmless."""

_UNSAFE_ATTRIBUTES = _names(
    """
    os sys subprocess builtins shutil socket importlib posix nt ctypes pickle marshal runpy _os
    _sys _subprocess
    """
)
"""Modules that are refused as an attribute of any other module."""

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")
_LONGEST_NAME = 1024


def check_global(module: str, name: str, file: str) -> None:
    """Raise when a global does not belong in a checkpoint.

    Parameters
    ----------
    module, name
        The global, by its Python 3 spelling.
    file
        The file that names it.

    Raises
    ------
    HostileFileError
        The global reaches the system, the interpreter or other files.
    ArchiveError
        It is not a name at all.
    """
    dotted = f"{module}.{name}"
    if len(dotted) > _LONGEST_NAME or not _MODULE.match(module) or not _MODULE.match(name):
        raise ArchiveError(
            "the pickle names a global that is not a Python name",
            file=file,
            found=short_repr(dotted),
        )
    if _is_refused(module, name):
        raise HostileFileError(
            f"the file names {dotted}, which never belongs in a checkpoint",
            file=file,
            next_step="do not open it with torch.load; get the file again from a source you trust",
        )


def _is_refused(module: str, name: str) -> bool:
    if module in _RESTRICTED:
        return name not in _RESTRICTED[module]
    packages = _prefixes(module)
    if not _REFUSED_MODULES.isdisjoint(packages) or any(
        package in _REFUSED_SUBMODULES for package in packages
    ):
        return True
    if f"{module}.{name}" in _REFUSED_NAMES:
        return True
    return _is_unsafe_walk(module, name)


def _prefixes(module: str) -> list[str]:
    """Return the module and the packages it lies in: ``a.b.c`` gives ``a``, ``a.b``, ``a.b.c``."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts) + 1)]


def _is_unsafe_walk(module: str, name: str) -> bool:
    """Whether a name walks through attributes to where a global must not lead."""
    parts = name.split(".")
    inner = parts[:-1] if parts[-1] == "__new__" else parts
    if any(part.startswith("__") and part.endswith("__") for part in inner):
        return True
    if not _UNSAFE_ATTRIBUTES.isdisjoint(parts):
        return True
    if len(parts) == 1:
        return False
    # `a.b.c` may also mean a submodule: torch + hub.load is torch.hub + load.
    reached = [f"{module}.{'.'.join(parts[:count])}" for count in range(1, len(parts) + 1)]
    return not _REFUSED_MODULES.isdisjoint(parts[:-1]) or any(
        path in _REFUSED_SUBMODULES or path in _REFUSED_NAMES for path in reached
    )
