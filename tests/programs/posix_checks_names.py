"""Checks of names: rename, link, unlink, directories, limits of names."""

import os
import random
import stat

from posix_support import (O_TMPFILE, RENAME_EXCHANGE, RENAME_NOREPLACE, RENAME_WHITEOUT, Skip,
                           call, check, equal, expect_errno, in_process, join, pattern, read_file,
                           renameat2, write_file)


def joiner(top):
    return lambda *names: os.path.join(top, *names)


@check
def rename_replaces_an_existing_file(top):
    at = joiner(top)
    write_file(at("a"), b"new")
    write_file(at("b"), b"old")
    inode = os.stat(at("a")).st_ino
    with open(at("b"), "rb") as still_open:
        os.rename(at("a"), at("b"))
        equal(still_open.read(), b"old", "content of the replaced open file")
        equal(os.fstat(still_open.fileno()).st_nlink, 0, "links of the replaced file")
    equal(read_file(at("b")), b"new")
    equal(os.stat(at("b")).st_ino, inode, "inode after rename")
    assert not os.path.exists(at("a"))
    expect_errno("ENOENT", os.rename, at("a"), at("c"))


@check
def rename_of_two_links_of_one_file_does_nothing(top):
    at = joiner(top)
    write_file(at("a"), b"x")
    os.link(at("a"), at("b"))
    os.rename(at("a"), at("b"))
    equal(sorted(os.listdir(top)), ["a", "b"])


@check
def rename_of_directories_keeps_to_the_rules(top):
    at = joiner(top)
    os.makedirs(at("full", "sub"))
    os.mkdir(at("empty"))
    write_file(at("file"))
    expect_errno(["ENOTEMPTY", "EEXIST"], os.rename, at("empty"), at("full"))
    expect_errno("EISDIR", os.rename, at("file"), at("empty"))
    expect_errno("ENOTDIR", os.rename, at("empty"), at("file"))
    expect_errno("EINVAL", os.rename, at("full"), at("full", "sub", "x"))
    expect_errno("EINVAL", os.rename, at("full"), at("full", "x"))
    os.rename(at("full"), at("empty"))
    equal(sorted(os.listdir(top)), ["empty", "file"])
    equal(os.listdir(at("empty")), ["sub"])


@check
def moving_a_directory_changes_its_dotdot_and_the_link_counts(top):
    at = joiner(top)
    os.makedirs(at("from", "child"))
    os.mkdir(at("to"))
    fd = os.open(at("from", "child"), os.O_RDONLY)
    before = [os.stat(at(n)).st_nlink for n in ("from", "to")]
    os.rename(at("from", "child"), at("to", "child"))
    after = [os.stat(at(n)).st_nlink for n in ("from", "to")]
    equal(os.stat("..", dir_fd=fd).st_ino, os.stat(at("to")).st_ino, "..")
    os.close(fd)
    if before != [1, 1]:  # a file system may decline to count directories
        equal((before, after), ([3, 2], [2, 3]), "link counts")


@check
def directory_link_counts_are_exact_or_one(top):
    at = joiner(top)
    for number in range(10):
        os.mkdir(at(f"d{number}"))
        write_file(at(f"f{number}"))
    links = os.stat(top).st_nlink
    assert links in (12, 1), f"link count {links} of a directory with ten directories"
    if links != 1:
        os.rmdir(at("d3"))
        equal(os.stat(top).st_nlink, 11)


@check
def rename_noreplace_refuses_an_existing_target(top):
    at = joiner(top)
    write_file(at("a"), b"a")
    write_file(at("b"), b"b")
    expect_errno("EEXIST", renameat2, at("a"), at("b"), RENAME_NOREPLACE)
    equal((read_file(at("a")), read_file(at("b"))), (b"a", b"b"))
    renameat2(at("a"), at("c"), RENAME_NOREPLACE)
    equal(sorted(os.listdir(top)), ["b", "c"])


@check
def rename_exchange_swaps_files_and_directories(top):
    at = joiner(top)
    write_file(at("file"), b"f")
    os.makedirs(at("dir", "inside"))
    os.mkdir(at("elsewhere"))
    write_file(at("elsewhere", "other"), b"o")
    renameat2(at("file"), at("elsewhere", "other"), RENAME_EXCHANGE)
    equal((read_file(at("file")), read_file(at("elsewhere", "other"))), (b"o", b"f"))
    renameat2(at("dir"), at("elsewhere", "other"), RENAME_EXCHANGE)
    equal(read_file(at("dir")), b"f")
    equal(os.listdir(at("elsewhere", "other")), ["inside"])
    expect_errno("ENOENT", renameat2, at("file"), at("nothing"), RENAME_EXCHANGE)
    expect_errno("EINVAL", renameat2, at("file"), at("dir"), RENAME_EXCHANGE | RENAME_NOREPLACE)


@check
def rename_whiteout_leaves_a_device_0_0(top):
    at = joiner(top)
    write_file(at("a"), b"a")
    renameat2(at("a"), at("b"), RENAME_WHITEOUT)
    info = os.lstat(at("a"))
    assert stat.S_ISCHR(info.st_mode) and info.st_rdev == 0
    equal(read_file(at("b")), b"a")


@check
def unlinked_open_file_lives_until_the_last_close(top):
    at = joiner(top)
    data = pattern(1, 300000)
    fd = os.open(at("f"), os.O_RDWR | os.O_CREAT, 0o600)
    os.write(fd, data[:150000])
    os.unlink(at("f"))
    os.write(fd, data[150000:])
    os.fsync(fd)
    equal(os.fstat(fd).st_nlink, 0)
    equal(os.pread(fd, len(data) + 1, 0), data)
    os.ftruncate(fd, 1000)
    os.fchmod(fd, 0o640)
    os.setxattr(fd, "user.late", b"1")
    equal(os.fstat(fd).st_size, 1000)
    write_file(at("f"), b"another file of the same name")
    equal(os.pread(fd, 2000, 0), data[:1000])
    equal(read_file(f"/proc/self/fd/{fd}"), data[:1000], "open again through /proc")
    os.close(fd)
    equal(read_file(at("f")), b"another file of the same name")


@check
def removed_directory_that_is_open_takes_no_new_files(top):
    at = joiner(top)
    os.mkdir(at("d"))
    fd = os.open(at("d"), os.O_RDONLY)
    os.rmdir(at("d"))
    equal(os.listdir(fd), [])
    expect_errno("ENOENT", os.open, "x", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=fd)
    expect_errno("ENOENT", os.mkdir, "x", dir_fd=fd)
    os.close(fd)


@check
def tmpfile_has_no_name_until_it_is_linked(top):
    at = joiner(top)
    try:
        fd = os.open(top, O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        raise Skip(f"O_TMPFILE: {error}") from error
    os.write(fd, b"unnamed")
    equal(os.listdir(top), [])
    equal(os.fstat(fd).st_nlink, 0)
    call("linkat", -100, f"/proc/self/fd/{fd}".encode(), -100, os.fsencode(at("named")), 0x400)
    os.fsync(fd)
    os.close(fd)
    equal(read_file(at("named")), b"unnamed")
    equal(os.stat(at("named")).st_nlink, 1)
    fd = os.open(top, O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)
    expect_errno("ENOENT", call, "linkat", -100, f"/proc/self/fd/{fd}".encode(), -100,
                 os.fsencode(at("never")), 0x400)
    os.close(fd)


@check
def hard_links_share_everything(top):
    at = joiner(top)
    write_file(at("a"), b"1")
    os.mkdir(at("d"))
    for number in range(200):
        os.link(at("a"), at("d", f"l{number}"))
    info = os.stat(at("d", "l77"))
    equal((info.st_nlink, info.st_ino), (201, os.stat(at("a")).st_ino))
    with open(at("d", "l3"), "ab") as file:
        file.write(b"2")
    os.chmod(at("d", "l4"), 0o601)
    os.setxattr(at("d", "l5"), "user.x", b"y")
    equal(read_file(at("a")), b"12")
    equal(stat.S_IMODE(os.stat(at("a")).st_mode), 0o601)
    equal(os.getxattr(at("a"), "user.x"), b"y")
    os.unlink(at("a"))
    equal(os.stat(at("d", "l0")).st_nlink, 200)
    expect_errno("EEXIST", os.link, at("d", "l0"), at("d", "l1"))
    expect_errno("EPERM", os.link, at("d"), at("dirlink"))
    os.symlink("nowhere", at("s"))
    os.link(at("s"), at("s2"), follow_symlinks=False)
    equal(os.readlink(at("s2")), "nowhere")
    equal(os.lstat(at("s")).st_nlink, 2)


@check
def symbolic_links_resolve_loop_and_have_a_length(top):
    at = joiner(top)
    write_file(at("target"), b"here")
    os.symlink("target", at("relative"))
    os.symlink(at("target"), at("absolute"))
    os.symlink("relative", at("chain"))
    os.symlink("loop2", at("loop1"))
    os.symlink("loop1", at("loop2"))
    os.symlink("missing", at("dangling"))
    for name in ("relative", "absolute", "chain"):
        equal(read_file(at(name)), b"here")
    equal(os.lstat(at("relative")).st_size, len("target"))
    expect_errno("ELOOP", os.open, at("loop1"), os.O_RDONLY)
    expect_errno("ELOOP", os.open, at("relative"), os.O_RDONLY | os.O_NOFOLLOW)
    expect_errno("ENOENT", os.open, at("dangling"), os.O_RDONLY)
    expect_errno("EEXIST", os.open, at("dangling"), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    write_file(at("dangling"), b"made through the link")
    equal(read_file(at("missing")), b"made through the link")
    for length in (1, 59, 60, 61, 255, 256, 1000, 1023):
        os.symlink("t" * length, at(f"length{length}"))
        equal(os.readlink(at(f"length{length}")), "t" * length)
    expect_errno("ENAMETOOLONG", os.symlink, "t" * 4096, at("too-long"))
    expect_errno("ENOENT", os.symlink, "", at("empty"))
    expect_errno("EINVAL", os.readlink, at("target"))


@check
def names_of_255_bytes_work_and_256_do_not(top):
    at = joiner(top)
    for name in ("n" * 255, "é" * 127 + "x", "文" * 85):
        write_file(at(name), name.encode())
        assert name in os.listdir(top)
        equal(read_file(at(name)), name.encode())
        longer = name + "y"
        expect_errno("ENAMETOOLONG", os.open, at(longer), os.O_CREAT | os.O_WRONLY)
        expect_errno("ENAMETOOLONG", os.mkdir, at(longer))
        expect_errno("ENAMETOOLONG", os.symlink, "x", at(longer))
        expect_errno("ENAMETOOLONG", os.rename, at(name), at(longer))
        expect_errno("ENAMETOOLONG", os.link, at(name), at(longer))
        expect_errno("ENAMETOOLONG", os.stat, at(longer))
    equal(os.statvfs(top).f_namemax, 255)


@check
def every_byte_but_slash_and_zero_makes_a_name(top):
    names = {bytes([byte]) for byte in range(1, 256) if byte not in b"/."}
    names |= {b"...", b" ", b"\xff\xfe\xfd", b"a\nb", b"CON", b"-rf", b"*"}
    for name in names:
        write_file(os.path.join(os.fsencode(top), name), name)
    equal(set(os.listdir(os.fsencode(top))), names)
    for name in names:
        equal(read_file(os.path.join(os.fsencode(top), name)), name)


@check
def names_differ_by_case_and_by_normalisation(top):
    at = joiner(top)
    names = ["a", "A", "\u00e9", "e\u0301", "stra\u00dfe", "strasse"]
    for name in names:
        write_file(at(name), name.encode())
    equal(sorted(os.listdir(top)), sorted(names))
    for name in names:
        equal(read_file(at(name)), name.encode())


@check
def deep_paths_work(top):
    here = os.getcwd()
    os.chdir(top)
    try:
        for _ in range(300):  # 300 directories of 15 bytes: longer than PATH_MAX
            os.mkdir("a-deep-directory"[:15])
            os.chdir("a-deep-directory"[:15])
        write_file("bottom", b"x")
        expect_errno(["ENAMETOOLONG", "ERANGE"], os.stat, "./" * 2100)
        os.unlink("bottom")
        for _ in range(300):
            os.chdir("..")
            os.rmdir("a-deep-directory"[:15])
        equal(os.stat(".").st_ino, os.stat(top).st_ino, "back at the top")
    finally:
        os.chdir(here)


@check
def directory_errors_have_the_right_code(top):
    at = joiner(top)
    os.makedirs(at("d", "sub"))
    write_file(at("f"))
    expect_errno(["ENOTEMPTY", "EEXIST"], os.rmdir, at("d"))
    expect_errno("ENOTDIR", os.rmdir, at("f"))
    expect_errno("ENOENT", os.rmdir, at("none"))
    expect_errno("EINVAL", os.rmdir, at("d", "sub", "."))
    expect_errno("EISDIR", os.unlink, at("d"))
    expect_errno("ENOENT", os.unlink, at("none"))
    expect_errno("ENOTDIR", os.unlink, at("f", "x"))
    expect_errno("ENOTDIR", os.listdir, at("f"))
    expect_errno("EEXIST", os.mkdir, at("d"))
    expect_errno("EEXIST", os.mkdir, at("f"))
    expect_errno("EEXIST", os.open, at("f"), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    expect_errno("EISDIR", os.open, at("d"), os.O_WRONLY)
    expect_errno("ENOTDIR", os.open, at("f"), os.O_DIRECTORY)
    fd = os.open(at("d"), os.O_RDONLY)
    expect_errno("EISDIR", os.read, fd, 10)
    os.close(fd)


@check
def special_files_keep_kind_mode_and_number(top):
    at = joiner(top)
    os.umask(0)
    os.mkfifo(at("fifo"), 0o640)
    os.mknod(at("char"), stat.S_IFCHR | 0o601, os.makedev(300, 200000))
    os.mknod(at("block"), stat.S_IFBLK | 0o622, os.makedev(7, 33))
    os.mknod(at("plain"), stat.S_IFREG | 0o604)
    os.mknod(at("socket"), stat.S_IFSOCK | 0o755)
    os.umask(0o022)
    info = {name: os.lstat(at(name)) for name in os.listdir(top)}
    equal(info["fifo"].st_mode, stat.S_IFIFO | 0o640)
    equal((info["char"].st_mode, info["char"].st_rdev),
          (stat.S_IFCHR | 0o601, os.makedev(300, 200000)))
    equal((info["block"].st_mode, info["block"].st_rdev), (stat.S_IFBLK | 0o622, os.makedev(7, 33)))
    equal(info["plain"].st_mode, stat.S_IFREG | 0o604)
    equal(info["socket"].st_mode, stat.S_IFSOCK | 0o755)
    kinds = {entry.name: entry.is_symlink() or entry.is_dir() for entry in os.scandir(top)}
    assert not any(kinds.values())

    def write_to_fifo():
        with open(at("fifo"), "wb") as file:
            file.write(b"through the pipe")
    child = in_process(write_to_fifo)
    equal(read_file(at("fifo")), b"through the pipe")
    join(child)


LARGE = 20000


@check
def readdir_of_20000_entries_during_modification(top):
    """Entries that exist all the time are seen exactly once; none is seen twice."""
    stay = {f"stay-{n:05d}-{'x' * (n % 40)}" for n in range(LARGE // 2)}
    for name in stay:
        os.close(os.open(os.path.join(top, name), os.O_CREAT | os.O_WRONLY))
    for number in range(LARGE // 2):
        os.close(os.open(os.path.join(top, f"go-{number}"), os.O_CREAT | os.O_WRONLY))
    equal(len(os.listdir(top)), LARGE)

    def modify():
        rng = random.Random(1)
        for number in rng.sample(range(LARGE // 2), LARGE // 4):
            os.unlink(os.path.join(top, f"go-{number}"))
            os.close(os.open(os.path.join(top, f"new-{number}"), os.O_CREAT | os.O_WRONLY))
    child = in_process(modify)
    for _ in range(8):
        seen = []
        with os.scandir(top) as entries:
            for entry in entries:
                seen.append(entry.name)
        equal(len(seen), len(set(seen)), "a name was returned twice")
        missing = stay - set(seen)
        assert not missing, f"{len(missing)} entries missed, such as {min(missing)}"
    join(child)
    final = os.listdir(top)
    equal(len(final), LARGE)
    equal(sum(name.startswith("new-") for name in final), LARGE // 4)


@check
def deleting_while_reading_a_directory_deletes_all(top):
    for number in range(5000):
        os.close(os.open(os.path.join(top, f"f{number}"), os.O_CREAT | os.O_WRONLY))
    with os.scandir(top) as entries:
        for entry in entries:
            os.unlink(entry.path)
    equal(os.listdir(top), [])
    os.rmdir(top)
    os.mkdir(top)


@check
def concurrent_creation_of_one_name_succeeds_once(top):
    def create(worker):
        won = 0
        for number in range(300):
            try:
                os.close(os.open(os.path.join(top, f"n{number}"),
                                 os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                won += 1
            except FileExistsError:
                pass
        os.mkdir(os.path.join(top, f"worker{worker}-{won}"))
    join(*[in_process(create, worker) for worker in range(4)])
    won = sum(int(name.split("-")[1]) for name in os.listdir(top) if name.startswith("worker"))
    equal(won, 300, "files created exclusively")


@check
def concurrent_renames_lose_no_file(top):
    for directory in ("a", "b", "c"):
        os.mkdir(os.path.join(top, directory))
    for number in range(100):
        write_file(os.path.join(top, "a", f"f{number}"), str(number).encode())

    def shuffle(worker):
        rng = random.Random(worker)
        for _ in range(500):
            name = f"f{rng.randrange(100)}"
            source, target = rng.sample("abc", 2)
            try:
                os.rename(os.path.join(top, source, name), os.path.join(top, target, name))
            except FileNotFoundError:
                pass
    join(*[in_process(shuffle, worker) for worker in range(4)])
    names = sorted(name for d in "abc" for name in os.listdir(os.path.join(top, d)))
    equal(names, sorted(f"f{n}" for n in range(100)))


@check
def readdir_reports_inode_numbers_of_stat(top):
    at = joiner(top)
    for number in range(200):
        write_file(at(f"f{number}"))
        os.mkdir(at(f"d{number}"))
    for entry in os.scandir(top):
        equal(entry.inode(), os.lstat(entry.path).st_ino, f"inode of {entry.name}")
        equal(entry.is_dir(follow_symlinks=False), entry.name.startswith("d"))
