"""Files in folders that other users can write to: opened without a trap, and read within limits.

A shared file system and the disks of the nodes hold what other users put there: links to somebody
else's files, pipes that block whoever opens them, files without end, folders that have the name of
ours. Trusted is what belongs to the user of this process, or to the group that the cluster profile
names; what runs code (compiled graphs, environments) is used only if it is trusted. All checks are
made on the open descriptor, because a path can be replaced between a check and its use.

Every refusal is an OSError with the reason as `strerror`, so that callers need no other handling
than for a disk that refuses.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import grp
import os
import pwd
import stat
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import tarfile

# Bytes of a record or a YAML file; the largest, a checkpoint's manifest of 8,192 workers, has 4 MB.
LARGEST_RECORD = 1 << 26
LFS_POINTER = b"version https://git-lfs"
LFS_REASON = "a Git LFS pointer, not the file; fetch it with `git lfs pull`"
_MOST_LINKS = 40  # on a path, as in the kernel
# For opening a file to write: through no link, and without waiting for the reader of a pipe.
_NEW_OR_PLAIN = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
LONGEST_LINE = 1 << 20  # of a record in a file of lines; a step's metrics have 500 bytes


def open_regular(path: Path, *, follow: bool = True) -> BufferedReader:
    """Open a regular file to read it, without waiting for the writer of a pipe.

    Another user's link may lead to files of that user and to those of root that everybody may read:
    what is read of any other file could end up where that user can read it.

    Args:
        follow: Whether `path` itself may be a symbolic link.
    """
    # Without O_NONBLOCK, opening a pipe waits for its writer; for regular files it has no effect.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
    target, linked_by = path, set[int]()
    for _ in range(_MOST_LINKS):
        try:
            descriptor = os.open(target, flags)
            break
        except OSError as error:
            error.filename = str(path)
            if error.errno != errno.ELOOP or not follow:
                raise
        with contextlib.suppress(NotADirectoryError):  # no link any more
            link, owner = _read_link(target)
            target = target.parent / link
            linked_by |= {owner} - {0, os.geteuid()}
    else:
        raise OSError(errno.ELOOP, "too many links", str(path))
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        public = info.st_uid == 0 and info.st_mode & stat.S_IROTH
        for owner in linked_by - {info.st_uid}:
            if not public and not _is_unmapped(owner):
                whose = f"a link of {user_name(owner)} to a file of {user_name(info.st_uid)}"
                raise PermissionError(errno.EPERM, whose, str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_limited(
    path: Path, limit: int = LARGEST_RECORD, *, trusted: bool = False, group: str | None = None
) -> bytes:
    """Return the content of a regular file of at most `limit` bytes; OSError if it is larger.

    Args:
        trusted: Whether only this user, root and the members of `group` may have written it.
    """
    with open_trusted(path, group) if trusted else open_regular(path) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit:,} bytes", str(path))
    if content.startswith(LFS_POINTER):
        raise OSError(errno.ENODATA, LFS_REASON, str(path))
    return content


def read_lines(stream: BinaryIO, longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """Yield the lines of a file; OSError if one has more than `longest` bytes."""
    while line := stream.readline(longest + 1):
        _require_length(len(line), longest, stream)
        yield line


def read_pieces(stream: BinaryIO, size: int, longest: int) -> Iterator[bytes]:
    """Yield pieces of whole lines, each of about `size` bytes (at most `longest`).

    Raises OSError if a line has more than `longest` bytes.
    """
    while piece := stream.read(size):
        begin = piece.rfind(b"\n") + 1  # of the line that the piece ends in, or of the next
        piece += stream.readline(longest + 1)
        _require_length(len(piece) - begin, longest, stream)
        yield piece


def _require_length(length: int, longest: int, stream: BinaryIO) -> None:
    if length > longest:
        raise OSError(errno.EFBIG, f"a line of more than {longest:,} bytes", stream.name)


def os_error_text(error: OSError) -> str:
    """Return why a file cannot be read or written, and whose it is if permission is denied."""
    text = error.strerror or str(error)
    if error.errno != errno.EACCES or error.filename is None:
        return text
    path = Path(os.fsdecode(error.filename)).absolute()
    for entry in (path, *path.parents):  # in a closed folder not even the owner is known
        with contextlib.suppress(OSError):
            return f"{text}; {entry} belongs to {user_name(entry.lstat().st_uid)}"
    return text


def open_trusted(path: Path, group: str | None = None) -> BufferedReader:
    """Open a regular file, no link, that only trusted users can have written; OSError else.

    Args:
        group: Name of the group whose members are trusted too; None: nobody else.
    """
    stream = open_regular(path, follow=False)
    if error := untrusted_error(os.fstat(stream.fileno()), group):
        stream.close()
        raise PermissionError(errno.EPERM, error, str(path))
    return stream


def untrusted_error(info: os.stat_result, group: str | None = None) -> str | None:
    """Return why other users may have written a file or folder; None if it is trusted.

    It must belong to this user, to root, or to a member of a group that the caller trusts; and
    nobody else may write. The file's own group proves nothing: in a setgid folder it is the
    folder's.
    """
    if not _is_trusted(info.st_uid, group):
        allowed = "you" if group is None else f"you or the group {group}"
        return f"it belongs to {user_name(info.st_uid)}, not to {allowed}"
    writers = _other_writers(info, group)
    return f"{writers} may write to it" if writers else None


def _is_trusted(uid: int, group: str | None) -> bool:
    """Return whether a user is this one, root, or a member of a group that the caller trusts."""
    if uid in (0, os.geteuid()):
        return True
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return False
    return _group_id(group) in os.getgrouplist(user.pw_name, user.pw_gid)


def _other_writers(info: os.stat_result, group: str | None) -> str:
    """Return who else may write to a file or folder, such as `every user`; empty if nobody may."""
    if info.st_mode & stat.S_IWOTH:
        return "every user"
    if not info.st_mode & stat.S_IWGRP or info.st_gid == _group_id(group):
        return ""
    try:
        owner, user = grp.getgrgid(info.st_gid), pwd.getpwuid(os.geteuid())
    except KeyError:
        return f"the group {info.st_gid}"
    # This user's own group without other members, as Debian and Red Hat make it.
    private = user.pw_gid == info.st_gid and owner.gr_name == user.pw_name and not owner.gr_mem
    return "" if private else f"the group {owner.gr_name}"


def open_folder(path: Path) -> int:
    """Return a descriptor of a folder, which is made if it is missing.

    Below the first folder of this user, a link is followed only if it is this user's or root's:
    whoever may write to the folder of a run could else have files written into any other folder.
    Above it, another user's link may lead only to folders of that user and of root.

    Raises:
        OSError: Another user's link, or the file system refuses.
    """
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    folder, below_own, num_links = os.open("/", flags), False, 0
    links: list[tuple[int, int]] = []  # of others: owner, and names that remain at its target
    remaining = [*reversed(path.absolute().parts)]
    try:
        while remaining:
            name = remaining[-1]
            try:
                # O_DIRECTORY: without it, an automounter's folder is not mounted.
                inside = os.open(name, flags | os.O_DIRECTORY, dir_fd=folder)
            except FileNotFoundError:
                _refuse_linked(links, os.geteuid())  # whose folder it would be
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=folder)
            except NotADirectoryError:
                num_links += 1
                if num_links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, "too many links", str(path)) from None
                target, owner = _read_link(name, folder)
                if owner not in (0, os.geteuid()) and not _is_unmapped(owner):
                    if below_own:
                        whose = f"{name} is a link of {user_name(owner)}; remove it"
                        raise PermissionError(errno.EPERM, whose, name) from None
                    links.append((owner, len(remaining) - 1))
                remaining[-1:] = reversed(target.parts)
                below_own = below_own and not target.is_absolute()
            else:
                remaining.pop()
                os.close(folder)
                folder = inside
                owner = os.fstat(folder).st_uid
                while links and links[-1][1] >= len(remaining):
                    _refuse_linked([links.pop()], owner)
                below_own = below_own or owner == os.geteuid()
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)  # of the call it is a single name
        raise
    finally:
        os.close(folder)


def _refuse_linked(links: Sequence[tuple[int, int]], owner: int) -> None:
    """Refuse a folder of `owner` that links of others lead to; one of root's is no trap."""
    for linked_by, _ in links:
        if owner != linked_by and (owner or not os.geteuid()):
            whose = f"{user_name(linked_by)} to a folder of {user_name(owner)}"
            raise PermissionError(errno.EPERM, f"a link of {whose}; name the folder")


def _read_link(name: str | Path, folder: int | None = None) -> tuple[Path, int]:
    """Return the target of a link and its owner; NotADirectoryError if it is none."""
    link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        info = os.fstat(link)
        if not stat.S_ISLNK(info.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{name} is not a folder", str(name))
        return Path(os.readlink("", dir_fd=link)), info.st_uid
    finally:
        os.close(link)


def write_whole(path: Path, content: bytes, mode: int = 0o644, *, durable: bool = True) -> None:
    """Write a file under a name that nobody can guess, and rename it.

    Args:
        durable: Whether it must survive a crash of the machine: with fsync of file and folder.
    """
    folder = open_folder(path.parent)
    # In the same folder: rename is atomic only within a file system.
    temporary = f".{path.name}.{os.urandom(4).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as stream:
            try:
                stream.write(content)
                stream.flush()
                os.fchmod(stream.fileno(), mode)
                if durable:
                    os.fsync(stream.fileno())
                os.rename(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
        if durable:
            os.fsync(folder)
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise
    finally:
        os.close(folder)


def write_error(folder: Path) -> str | None:
    """Return why nothing can be written into a folder, by a file without a name; None if it can."""
    import tempfile  # here and below: a command that does not need them starts sooner

    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            probe.write(bytes(4096))
            os.fsync(probe.fileno())  # NFS reports a full disk no sooner
    except OSError as error:
        return f"cannot write {folder}: {error.strerror or error}"
    return None


def open_append(path: Path) -> int:
    """Return a descriptor that appends to a file; neither it nor its folder is another's link."""
    return _open_in_folder(path, os.O_WRONLY | os.O_APPEND)


def open_update(path: Path) -> int:
    """Return a descriptor to overwrite this user's own file in place, made if it is missing."""
    return _check_own(_open_in_folder(path, os.O_WRONLY), path)


def open_lock(path: Path) -> BinaryIO:
    """Open this user's own lock file, made if it is missing; never through a link."""
    return os.fdopen(_check_own(os.open(path, os.O_RDWR | _NEW_OR_PLAIN, 0o600), path), "r+b")


def _open_in_folder(path: Path, flags: int) -> int:
    folder = open_folder(path.parent)
    try:
        return os.open(path.name, flags | _NEW_OR_PLAIN, 0o644, dir_fd=folder)
    except OSError as error:
        error.filename = str(path)  # of the call it is a single name
        raise
    finally:
        os.close(folder)


def _check_own(descriptor: int, path: Path) -> int:
    info = os.fstat(descriptor)
    if stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and info.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    if not info.st_nlink:
        raise FileNotFoundError(errno.ENOENT, "removed while it was opened", str(path))
    if not stat.S_ISREG(info.st_mode) or info.st_nlink > 1:
        raise OSError(errno.EINVAL, "not a file of its own", str(path))
    owner = user_name(info.st_uid)
    raise PermissionError(errno.EPERM, f"it belongs to {owner}, not to you", str(path))


def unpack_tar(
    archive: tarfile.TarFile, folder: Path, members: Sequence[tarfile.TarInfo] | None = None
) -> None:
    """Unpack files, folders and links that stay inside a folder, as `filter="data"` does."""
    import tarfile

    if hasattr(tarfile, "data_filter"):
        archive.extractall(folder, members=members, filter="data")
        return
    # Python before 3.11.4, such as Debian 12's, has no filters.
    inside = Path(os.path.realpath(folder))
    for member in archive if members is None else members:
        link = member.linkname if member.issym() or member.islnk() else ""
        base = Path(member.name).parent if member.issym() else Path()
        for name in filter(None, (member.name, link and str(base / link))):
            if not Path(os.path.realpath(inside / name)).is_relative_to(inside):
                raise tarfile.ExtractError(f"{member.name!r} leads outside the folder")
        if not (member.isreg() or member.isdir() or link) or link.startswith("/"):
            raise tarfile.ExtractError(f"{member.name!r} is no file, folder or relative link")
        member.mode = (member.mode & 0o755) | (0o700 if member.isdir() else 0o600)
        member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
        archive.extract(member, inside)


def make_private_folder(path: Path) -> Path:
    """Return this user's own folder: `path`, or one next to it where somebody else took the name.

    The folder has mode 0700. Whoever uses it later calls `check_private_folder` again. The name of
    the second one cannot be guessed; it is found and used again.
    """
    import tempfile

    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        # mkdtemp adds eight characters.
        others = sorted(path.parent.glob(f"{glob.escape(path.name)}-????????"))
        for candidate in (path, *others):
            with contextlib.suppress(OSError):
                check_private_folder(candidate)
                return candidate
        return Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))
    return path


def group_error(group: str) -> str | None:
    """Return why this user cannot give files to a group; None for root and the members."""
    if (group_id := _group_id(group)) is None:
        return f"there is no group {group} on this machine"
    if os.geteuid() and group_id not in (os.getegid(), *os.getgroups()):
        return f"you are not a member of the group {group}"
    return None


def give_to_group(folder: Path, group: str) -> None:
    """Give a folder, and what will be made in it, to a group; OSError if that is refused."""
    if error := group_error(group):
        raise PermissionError(errno.EPERM, error, str(folder))
    os.chown(folder, -1, grp.getgrnam(group).gr_gid)
    # Afterwards: chown clears the setgid bit.
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_ISGID)


def own_folder(parent: Path, name: str, group: str | None = None) -> Path:
    """Return a folder that several runs share: `name`, or this user's own next to another's."""
    folder = parent / name
    # Every link has mode 777: its owner counts, and the folder that it names.
    if os.path.lexists(folder) and (
        folder.lstat().st_uid not in (0, os.geteuid())
        or (folder.exists() and untrusted_error(folder.stat(), group))
    ):
        return make_private_folder(parent / f"{name}-{os.geteuid()}")
    return folder


def check_private_folder(path: Path) -> None:
    """Refuse a folder that is a link, is not this user's, or that others may enter."""
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        error = "not a folder"
    elif info.st_uid != os.geteuid():
        error = f"it belongs to {user_name(info.st_uid)}, not to you"
    elif stat.S_IMODE(info.st_mode) & 0o077:
        error = f"its mode is {stat.S_IMODE(info.st_mode):o}, not 700"
    else:
        return
    raise PermissionError(errno.EPERM, error, str(path))


def replaceable_error(folder: Path, group: str | None = None) -> str | None:
    """Return why users outside a trusted group may replace a folder, one above it, or a file in it.

    None if they may not.
    """
    path = folder.resolve()
    for entry in (path, *path.parents):
        info = entry.stat()
        # A sticky bit does not stop the owner.
        if not _is_trusted(info.st_uid, group) and not _is_unmapped(info.st_uid):
            return f"{entry} belongs to {user_name(info.st_uid)}, who may replace what is in it"
        # With a sticky bit, as /tmp has it, only owners rename and remove.
        if (who := _other_writers(info, group)) and not info.st_mode & stat.S_ISVTX:
            mode = f"{stat.S_IMODE(info.st_mode):o}"
            return (
                f"{who} may replace what is in {entry}, which has mode {mode} and no sticky bit "
                f"(`chmod +t {entry}`)"
            )
    return None


def _is_unmapped(uid: int) -> bool:
    """Return whether this container shows an owner of outside, such as root, as this id."""
    overflow, users = (Path("/proc", p) for p in ("sys/kernel/overflowuid", "self/uid_map"))
    return uid == int(overflow.read_text()) and int(users.read_text().split()[2]) < 2**32 - 1


def user_name(uid: int) -> str:
    """`mallory (uid 1001)`, or `uid 1001` if this machine does not know it."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


def _group_id(name: str | None) -> int | None:
    try:
        return None if name is None else grp.getgrnam(name).gr_gid
    except KeyError:  # not a group of this machine: nobody is in it
        return None
