"""Checks of owners, modes, attributes, times and sizes of the whole file system."""

import os
import shutil
import stat
import struct
import subprocess
import time

from posix_support import (ANOTHER_GROUP, ANOTHER_USER, BLOCK_BYTES, Skip, aligned_buffer,
                           as_user, call, check, equal, expect_errno, fallocate, pattern,
                           read_file, write_file)

SECOND_NS = 10**9


def mode_of(path):
    return stat.S_IMODE(os.lstat(path).st_mode)


@check
def permission_bits_bind_another_user(top):
    path = os.path.join(top, "f")
    write_file(path, b"secret", 0o600)
    os.mkdir(os.path.join(top, "closed"), 0o700)
    write_file(os.path.join(top, "closed", "inside"))
    write_file(os.path.join(top, "readable"), b"public", 0o644)
    write_file(os.path.join(top, "group"), b"for the group", 0o640)
    os.chown(os.path.join(top, "group"), 0, 7777)

    def other():
        expect_errno("EACCES", os.open, path, os.O_RDONLY)
        expect_errno("EACCES", os.open, path, os.O_WRONLY)
        expect_errno("EACCES", os.listdir, os.path.join(top, "closed"))
        expect_errno("EACCES", os.stat, os.path.join(top, "closed", "inside"))
        equal(read_file(os.path.join(top, "readable")), b"public")
        expect_errno("EACCES", os.open, os.path.join(top, "readable"), os.O_WRONLY)
        expect_errno("EACCES", os.truncate, os.path.join(top, "readable"), 0)
        expect_errno("EACCES", os.open, os.path.join(top, "new"), os.O_CREAT | os.O_WRONLY)
        expect_errno("EACCES", os.mkdir, os.path.join(top, "newdir"))
        expect_errno("EACCES", os.unlink, os.path.join(top, "readable"))
        expect_errno("EACCES", os.rename, os.path.join(top, "readable"), os.path.join(top, "x"))
        expect_errno("EPERM", os.chmod, os.path.join(top, "readable"), 0o777)
        expect_errno("EPERM", os.chown, os.path.join(top, "readable"), ANOTHER_USER, -1)
        expect_errno("EPERM", os.utime, os.path.join(top, "readable"), (1, 1))
        expect_errno("EACCES", os.utime, os.path.join(top, "readable"))
        expect_errno(["EPERM", "EACCES"], os.mknod, os.path.join(top, "dev"), stat.S_IFCHR, 1)
        assert not os.access(path, os.R_OK)
    os.chmod(top, 0o755)
    as_user(other)
    as_user(lambda: equal(read_file(os.path.join(top, "group")), b"for the group"), groups=[7777])
    as_user(lambda: expect_errno("EACCES", os.open, os.path.join(top, "group"), os.O_RDONLY))


@check
def new_files_belong_to_their_maker(top):
    os.chmod(top, 0o777)

    def other():
        write_file(os.path.join(top, "f"), b"mine", 0o666)
        os.mkdir(os.path.join(top, "d"))
        os.symlink("x", os.path.join(top, "s"))
        os.chmod(os.path.join(top, "f"), 0o400)
        expect_errno("EACCES", os.open, os.path.join(top, "f"), os.O_WRONLY)
        fd = os.open(os.path.join(top, "readonly"), os.O_CREAT | os.O_WRONLY, 0o400)
        os.write(fd, b"a descriptor keeps its rights")
        os.close(fd)
    as_user(other)
    for name in ("f", "d", "s"):
        info = os.lstat(os.path.join(top, name))
        equal((info.st_uid, info.st_gid), (ANOTHER_USER, ANOTHER_GROUP), name)
    equal((mode_of(top + "/f"), mode_of(top + "/d")), (0o400, 0o755))


@check
def setgid_directory_hands_down_its_group(top):
    os.chown(top, 0, 7777)
    os.chmod(top, 0o2777)

    def other():
        write_file(os.path.join(top, "f"))
        os.mkdir(os.path.join(top, "d"))
        write_file(os.path.join(top, "d", "g"))
    as_user(other)
    for name in ("f", "d", "d/g"):
        equal(os.stat(os.path.join(top, name)).st_gid, 7777, name)
    assert mode_of(top + "/d") & stat.S_ISGID, "a directory inherits the setgid bit"
    assert not mode_of(top + "/f") & stat.S_ISGID


@check
def sticky_directory_protects_files_of_others(top):
    os.chmod(top, 0o1777)
    write_file(os.path.join(top, "root-file"), b"x", 0o666)

    def other():
        expect_errno("EPERM", os.unlink, os.path.join(top, "root-file"))
        expect_errno("EPERM", os.rename, os.path.join(top, "root-file"), os.path.join(top, "mine"))
        write_file(os.path.join(top, "own"))
        expect_errno("EPERM", os.rename, os.path.join(top, "own"), os.path.join(top, "root-file"))
        os.unlink(os.path.join(top, "own"))
    as_user(other)
    assert os.path.exists(os.path.join(top, "root-file"))


def suid_file(top, mode=0o6777):
    path = os.path.join(top, "s")
    write_file(path, b"0123456789" * 1000)
    os.chmod(path, mode)
    return path


@check
def write_by_another_user_clears_suid_and_sgid(top):
    def overwrite(path):
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, b"x")
        os.close(fd)
    path = suid_file(top)
    as_user(overwrite, path)
    equal(oct(mode_of(path)), oct(0o777), "mode after a write")
    path = suid_file(top)
    as_user(os.truncate, path, 3)
    equal(oct(mode_of(path)), oct(0o777), "mode after truncate")
    path = suid_file(top, 0o2767)  # setgid without group execution is no privilege
    as_user(overwrite, path)
    assert mode_of(path) in (0o2767, 0o767), oct(mode_of(path))


@check
def a_program_that_another_user_changed_does_not_run_for_its_owner(top):
    if os.statvfs(top).f_flag & os.ST_NOSUID:
        raise Skip("the file system is mounted with nosuid")
    program = read_file(shutil.which("id"))

    def write(path):
        with open(path, "r+b") as file:
            file.write(program[:100])

    def write_past_the_cache(path):
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
        buffer = aligned_buffer(BLOCK_BYTES)
        buffer[:] = program[:BLOCK_BYTES]
        os.pwrite(fd, buffer, 0)
        os.close(fd)

    def allocate(path):
        fd = os.open(path, os.O_RDWR)
        fallocate(fd, 0, 0, len(program))
        os.close(fd)

    def copy(path):
        fd = os.open(path, os.O_WRONLY)
        with open(os.path.join(top, "other"), "rb") as source:
            os.copy_file_range(source.fileno(), fd, 100)
        os.close(fd)

    def empty_and_write(path):
        write_file(path, program)

    def empty_and_write_through_the_cache(path):
        fd = os.open(path, os.O_RDWR | os.O_TRUNC)
        os.write(fd, program)
        os.close(fd)

    def cut(path):
        os.truncate(path, len(program))

    def change_and_run(change, path):
        change(path)
        user = subprocess.run([path, "-u"], stdout=subprocess.PIPE, check=True).stdout
        equal(int(user), ANOTHER_USER, f"user of a program after {change.__name__}")

    os.chmod(top, 0o777)
    write_file(os.path.join(top, "other"), program)
    for change in (write, write_past_the_cache, allocate, copy, empty_and_write,
                   empty_and_write_through_the_cache, cut):
        path = os.path.join(top, change.__name__)
        write_file(path, program)
        os.chmod(path, 0o6777)
        as_user(change_and_run, change, path)


@check
def fallocate_by_another_user_clears_suid(top):
    def allocate(path):
        fd = os.open(path, os.O_RDWR)
        fallocate(fd, 0, 0, 100000)
        os.close(fd)
    path = suid_file(top)
    as_user(allocate, path)
    equal(oct(mode_of(path)), oct(0o777), "mode after fallocate")


@check
def chown_clears_suid_and_sgid(top):
    path = suid_file(top, 0o6755)
    os.chown(path, 1234, 1234)
    equal(oct(mode_of(path)), oct(0o755), "mode after chown by root")
    path = suid_file(top, 0o2744)
    os.chown(path, ANOTHER_USER, 4321)
    assert mode_of(path) in (0o2744, 0o744), oct(mode_of(path))
    directory = os.path.join(top, "d")
    os.mkdir(directory)
    os.chmod(directory, 0o2755)
    os.chown(directory, 5, 5)
    equal(oct(mode_of(directory)), oct(0o2755), "a directory keeps its setgid bit")
    for kind in stat.S_IFSOCK, stat.S_IFIFO:
        path = os.path.join(top, f"kind {kind}")
        os.mknod(path, kind | 0o755)
        os.chmod(path, 0o6755)
        os.chown(path, 5, 5)
        equal(oct(mode_of(path)), oct(0o755), "mode of a special file after chown")


@check
def an_outsider_does_not_end_privileges(top):
    def ask_for_nothing(path):
        try:
            os.chown(path, -1, -1)
        except PermissionError:
            pass
    path = suid_file(top, 0o6755)
    as_user(ask_for_nothing, path)
    os.listdir(top)  # which has the kernel ask what the file is like now
    equal(oct(mode_of(path)), oct(0o6755), "mode after a request of another user")


@check
def a_new_file_keeps_the_mode_that_it_is_made_with(top):
    def make(path, flags):
        os.close(os.open(path, flags | os.O_WRONLY | os.O_CREAT, 0o6755))
        os.listdir(top)  # which has the kernel ask what the file is like now
        equal(oct(mode_of(path)), oct(0o6755), "mode of a new file")
    os.chmod(top, 0o777)
    as_user(make, os.path.join(top, "new"), 0)
    as_user(make, os.path.join(top, "truncated"), os.O_TRUNC)
    as_user(make, os.path.join(top, "exclusive"), os.O_TRUNC | os.O_EXCL)


@check
def chmod_by_an_outsider_of_the_group_drops_sgid(top):
    path = suid_file(top, 0o755)
    os.chown(path, ANOTHER_USER, 7777)
    as_user(os.chmod, path, 0o2755)
    equal(oct(mode_of(path)), oct(0o755))
    as_user(os.chmod, path, 0o4755)
    equal(oct(mode_of(path)), oct(0o4755), "the owner may set suid")


@check
def chown_takes_large_ids_and_partial_changes(top):
    path = os.path.join(top, "f")
    write_file(path)
    os.chown(path, 4294967294, 4294967294)
    info = os.stat(path)
    equal((info.st_uid, info.st_gid), (4294967294, 4294967294))
    os.chown(path, 5, -1)
    os.chown(path, -1, 6)
    info = os.stat(path)
    equal((info.st_uid, info.st_gid), (5, 6))
    os.symlink("f", os.path.join(top, "l"))
    os.lchown(os.path.join(top, "l"), 9, 9)
    equal((os.lstat(os.path.join(top, "l")).st_uid, os.stat(path).st_uid), (9, 5))


@check
def umask_and_all_modes_apply(top):
    for mask in (0, 0o027, 0o077, 0o777):
        os.umask(mask)
        path = os.path.join(top, f"m{mask}")
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o777))
        os.mkdir(path + "d", 0o777)
        os.umask(0o022)
        equal((mode_of(path), mode_of(path + "d")), (0o777 & ~mask, 0o777 & ~mask))
    path = os.path.join(top, "all")
    write_file(path)
    for mode in range(0, 0o10000, 73):
        os.chmod(path, mode)
        equal(mode_of(path), mode)


@check
def acl_grants_denies_and_follows_chmod(top):
    path = os.path.join(top, "f")
    write_file(path, b"acl", 0o600)
    subprocess.run(["setfacl", "-m", f"u:{ANOTHER_USER}:r", path], check=True)
    as_user(lambda: equal(read_file(path), b"acl"))
    as_user(lambda: expect_errno("EACCES", os.open, path, os.O_WRONLY))
    equal(oct(mode_of(path)), oct(0o640), "the mask shows in the group bits")
    os.chmod(path, 0o600)  # takes the mask away, so the entry grants nothing
    as_user(lambda: expect_errno("EACCES", os.open, path, os.O_RDONLY))
    directory = os.path.join(top, "d")
    os.mkdir(directory)
    subprocess.run(["setfacl", "-m", f"d:u:{ANOTHER_USER}:rw", directory], check=True)
    write_file(os.path.join(directory, "child"), b"inherited", 0o660)
    os.chmod(directory, 0o755)
    listed = subprocess.run(["getfacl", "-cn", os.path.join(directory, "child")], check=True,
                            capture_output=True, text=True).stdout
    assert f"user:{ANOTHER_USER}:rw" in listed, f"no inherited entry in:\n{listed}"
    as_user(lambda: equal(read_file(os.path.join(directory, "child")), b"inherited"))


@check
def an_absent_access_list_can_be_removed(top):
    path = os.path.join(top, "f")
    write_file(path)
    os.removexattr(path, "system.posix_acl_access")
    os.removexattr(top, "system.posix_acl_access")
    os.removexattr(top, "system.posix_acl_default")
    equal(mode_of(path), 0o644)


@check
def an_access_list_leaves_setgid_to_members_of_the_group(top):
    directory = os.path.join(top, "d")
    os.mkdir(directory)
    os.chown(directory, ANOTHER_USER, 7777)

    def share():
        nobody = 0xFFFFFFFF
        entries = ((1, 7, nobody), (2, 7, 4242), (4, 7, nobody), (16, 7, nobody), (32, 0, nobody))
        value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        os.setxattr(directory, "system.posix_acl_access", value)
    os.chmod(directory, 0o2770)
    as_user(share, groups=[4321, 7777])
    equal(oct(mode_of(directory)), oct(0o2770), "mode after a list of a member of the group")
    as_user(share, groups=[4321])
    equal(oct(mode_of(directory)), oct(0o770), "mode after a list of somebody else")


@check
def extended_attributes_hold_their_limits(top):
    path = os.path.join(top, "f")
    write_file(path)
    os.setxattr(path, "user.a", b"1", os.XATTR_CREATE)
    expect_errno("EEXIST", os.setxattr, path, "user.a", b"2", os.XATTR_CREATE)
    expect_errno("ENODATA", os.setxattr, path, "user.b", b"2", os.XATTR_REPLACE)
    os.setxattr(path, "user.a", b"22", os.XATTR_REPLACE)
    equal(os.getxattr(path, "user.a"), b"22")
    both = os.XATTR_CREATE | os.XATTR_REPLACE
    expect_errno("EEXIST", os.setxattr, path, "user.a", b"2", both)
    expect_errno("ENODATA", os.setxattr, path, "user.b", b"2", both)
    for prefix in ("user.", "trusted.", "security."):
        expect_errno("EINVAL", os.setxattr, path, prefix, b"")
        expect_errno("EINVAL", os.getxattr, path, prefix)
        expect_errno("EINVAL", os.removexattr, path, prefix)
    expect_errno("ENODATA", os.getxattr, path, "user.none")
    expect_errno("ENODATA", os.removexattr, path, "user.none")
    os.setxattr(path, "user.empty", b"")
    equal(os.getxattr(path, "user.empty"), b"")
    longest = "user." + "n" * 250
    os.setxattr(path, longest, b"long name")
    equal(os.getxattr(path, longest), b"long name")
    expect_errno(["ERANGE", "ENAMETOOLONG"], os.setxattr, path, longest + "n", b"")
    os.setxattr(path, "user.large", pattern(1, 2000))
    equal(os.getxattr(path, "user.large"), pattern(1, 2000))
    expect_errno(["E2BIG", "ERANGE"], os.setxattr, path, "user.huge", bytes(65537))
    expect_errno(["EOPNOTSUPP", "EPERM", "EINVAL"], os.setxattr, path, "nonsense.name", b"")
    for number in range(40):
        os.setxattr(path, f"user.many{number}", str(number).encode())
    equal(len([n for n in os.listxattr(path) if n.startswith("user.many")]), 40)
    for number in range(40):
        os.removexattr(path, f"user.many{number}")
    equal(sorted(n for n in os.listxattr(path) if n.startswith("user.")),
          sorted(["user.a", "user.empty", "user.large", longest]))
    os.mkdir(os.path.join(top, "d"))
    os.setxattr(os.path.join(top, "d"), "user.dir", b"yes")
    os.setxattr(os.path.join(top, "d"), "trusted.dir", b"yes")
    os.symlink("f", os.path.join(top, "l"))
    os.setxattr(os.path.join(top, "l"), "trusted.link", b"on the link", follow_symlinks=False)
    equal(os.getxattr(os.path.join(top, "l"), "trusted.link", follow_symlinks=False), b"on the link")
    expect_errno("ENODATA", os.getxattr, path, "trusted.link")

    os.setxattr(path, "trusted.file", b"for root only")
    assert "trusted.file" in os.listxattr(path)

    def other():
        expect_errno("EACCES", os.setxattr, path, "user.mine", b"")
        equal([n for n in os.listxattr(path) if n.startswith("trusted.")], [])
        assert "user.a" in os.listxattr(path)
        expect_errno(["ENODATA", "EPERM"], os.getxattr, path, "trusted.file")
        # Of this namespace the kernel leaves it to the file system who may what.
        for name in ("system.mine", "system.posix_acl_mine"):
            expect_errno(["EOPNOTSUPP", "EACCES", "EPERM"], os.setxattr, path, name, b"")
    as_user(other)


@check
def write_drops_file_capabilities(top):
    path = os.path.join(top, "f")
    write_file(path, b"program")
    os.chmod(path, 0o777)
    capability = struct.pack("<IIIII", 0x02000000 | 1, 0x2000, 0, 0, 0)
    os.setxattr(path, "security.capability", capability)
    equal(os.getxattr(path, "security.capability"), capability)

    def other():
        fd = os.open(path, os.O_WRONLY)
        os.write(fd, b"x")
        os.close(fd)
    as_user(other)
    expect_errno("ENODATA", os.getxattr, path, "security.capability")


@check
def times_are_set_to_the_nanosecond(top):
    path = os.path.join(top, "f")
    write_file(path)
    for seconds in (0, 1, 2**31 - 1, 2**31, 2**32 + 5, 8 * 10**9):
        for nanoseconds in (0, 1, 999999999):
            stamp = seconds * SECOND_NS + nanoseconds
            os.utime(path, ns=(stamp, stamp + SECOND_NS))
            info = os.stat(path)
            equal((info.st_atime_ns, info.st_mtime_ns), (stamp, stamp + SECOND_NS))
    os.utime(path, ns=(-5 * SECOND_NS + 3, -SECOND_NS))
    equal(os.stat(path).st_mtime_ns, -SECOND_NS, "a time before 1970")
    os.symlink("f", os.path.join(top, "l"))
    os.utime(os.path.join(top, "l"), ns=(7, 8), follow_symlinks=False)
    equal(os.lstat(os.path.join(top, "l")).st_mtime_ns, 8)
    before = time.time_ns() - SECOND_NS
    os.utime(path)
    info = os.stat(path)
    assert before <= info.st_mtime_ns <= time.time_ns() + SECOND_NS, "utime to now"


def changed(path, action, which):
    """Runs `action` and checks that exactly the times in `which` ("mc") move."""
    long_ago = 10**18
    os.utime(path, ns=(long_ago, long_ago))
    before = os.stat(path)
    time.sleep(0.02)
    action()
    after = os.stat(path)
    for letter, old, new in (("m", before.st_mtime_ns, after.st_mtime_ns),
                             ("c", before.st_ctime_ns, after.st_ctime_ns)):
        if letter in which:
            assert new > old, f"{action}: {letter}time has not moved"
        else:
            assert new == old, f"{action}: {letter}time has moved"


@check
def operations_move_the_right_times(top):
    path, directory = os.path.join(top, "f"), os.path.join(top, "d")
    write_file(path, b"0123456789")
    os.mkdir(directory)
    fd = os.open(path, os.O_RDWR)

    def write():
        os.pwrite(fd, b"x", 0)
        os.fsync(fd)
    changed(path, write, "mc")
    changed(path, lambda: os.ftruncate(fd, 5), "mc")
    changed(path, lambda: os.ftruncate(fd, 500), "mc")
    changed(path, lambda: os.chmod(path, 0o600), "c")
    changed(path, lambda: os.chown(path, 1, 1), "c")
    changed(path, lambda: os.link(path, path + "2"), "c")
    changed(path, lambda: os.unlink(path + "2"), "c")
    changed(path, lambda: os.setxattr(path, "user.t", b""), "c")
    changed(path, lambda: os.pread(fd, 5, 0), "")
    changed(path, lambda: os.close(os.open(path, os.O_WRONLY | os.O_TRUNC)), "mc")
    os.close(fd)
    inside = os.path.join(directory, "x")
    changed(directory, lambda: write_file(inside), "mc")
    changed(directory, lambda: write_file(inside, b"more"), "")
    changed(directory, lambda: os.chmod(inside, 0o600), "")
    changed(directory, lambda: os.rename(inside, inside + "2"), "mc")
    changed(directory, lambda: os.mkdir(inside), "mc")
    changed(directory, lambda: os.rmdir(inside), "mc")
    changed(directory, lambda: os.symlink("x", inside), "mc")
    changed(directory, lambda: os.unlink(inside), "mc")
    changed(directory, lambda: os.listdir(directory), "")


@check
def a_later_change_has_a_later_time(top):
    stamps = []
    for number in range(50):
        path = os.path.join(top, f"f{number}")
        write_file(path, b"x")
        stamps.append(os.stat(path).st_mtime_ns)
        time.sleep(0.001)
    equal(stamps, sorted(stamps))
    assert abs(stamps[-1] - time.time_ns()) < 2 * SECOND_NS


@check
def statfs_counts_space_and_files(top):
    fd = os.open(os.path.join(top, "f"), os.O_RDWR | os.O_CREAT)
    call("syncfs", fd)  # space of files deleted before must not come back in between
    info = os.statvfs(top)
    assert info.f_bsize >= 512 and info.f_frsize >= 512
    assert 0 < info.f_bavail <= info.f_bfree <= info.f_blocks
    assert info.f_namemax == 255
    for number in range(16):
        os.write(fd, pattern(number, 1 << 20))
    os.fsync(fd)
    call("syncfs", fd)
    after = os.statvfs(top)
    used = (info.f_bfree - after.f_bfree) * info.f_frsize
    assert used > 8 << 20, f"16 MiB written, {used} bytes less free"
    blocks = os.fstat(fd).st_blocks * 512
    assert 16 << 20 <= blocks < 32 << 20, f"st_blocks says {blocks} bytes"
    os.close(fd)


@check
def inode_numbers_are_stable_and_distinct(top):
    inodes = {}
    for number in range(500):
        path = os.path.join(top, f"f{number}")
        write_file(path)
        inodes[path] = os.stat(path).st_ino
    equal(len(set(inodes.values())), 500)
    for path, inode in inodes.items():
        os.rename(path, path + "r")
        equal(os.stat(path + "r").st_ino, inode)
    equal(len({os.stat(os.path.join(top, n)).st_dev for n in os.listdir(top)}), 1)


@check
def file_handles_and_access_calls_work(top):
    path = os.path.join(top, "f")
    write_file(path, b"", 0o500)
    as_user(lambda: equal([os.access(path, m) for m in (os.F_OK, os.R_OK, os.W_OK, os.X_OK)],
                          [True, False, False, False]))
    os.chown(path, ANOTHER_USER, 0)
    as_user(lambda: equal([os.access(path, m) for m in (os.F_OK, os.R_OK, os.W_OK, os.X_OK)],
                          [True, True, False, True]))


@check
def birth_time_is_reported(top):
    path = os.path.join(top, "f")
    write_file(path, b"x")
    os.utime(path, (1, 1))
    text = subprocess.run(["stat", "-c", "%W", path], check=True, capture_output=True,
                          text=True).stdout.strip()
    if text in ("0", "-"):
        raise Skip("FUSE does not pass the birth time on")
    assert abs(int(text) - time.time()) < 10, f"born at {text}"
