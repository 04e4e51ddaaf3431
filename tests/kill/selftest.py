"""Shows that the checker of workloads.py accepts a true history and catches every kind of lie:
each case runs the writers on the host, plants one damage, and the check has to find it."""

import os
import shutil
import tempfile

import workloads
from targets import say


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x55]))


def copy_of(root, history, seed, name):
    """The workload `name`, and what it acknowledged."""
    workload = dict(workloads.workloads(root, seed))[name]
    acked, submitted, _ = workloads.read_history(os.path.join(history, name))
    return workload, acked, submitted


def last_log(workload, acked):
    """The last file of the append log and the bytes of it that were acknowledged."""
    file, end = 0, 0
    for number, operation in workload.planned(acked):
        file, end = operation[1], operation[2] + operation[3]
    return workload.path(f"log{file}"), end


def drop_acknowledged_record(root, history, seed):
    workload, acked, _ = copy_of(root, history, seed, "appendlog0")
    path, end = last_log(workload, acked)
    os.truncate(path, max(0, end - 1)) if end else os.unlink(path)


def zero_acknowledged_record(root, history, seed):
    workload, _, _ = copy_of(root, history, seed, "appendlog0")
    with open(workload.path("log0"), "r+b") as file:
        file.write(bytes(100))


def stale_bytes_after_the_end(root, history, seed):
    workload, acked, _ = copy_of(root, history, seed, "appendlog0")
    path, _ = last_log(workload, acked)
    with open(path, "ab") as file:
        file.write(b"what another file held before" * 40)


def remove_acknowledged_log(root, history, seed):
    workload, _, _ = copy_of(root, history, seed, "appendlog0")
    os.unlink(workload.path("log0"))


def revert_slot(root, history, seed):
    workload, acked, _ = copy_of(root, history, seed, "slots0")
    versions = {}
    for _, (kind, slot, version, _) in workload.planned(acked):
        if kind == "write":
            versions[slot] = version
    slot = max(versions, key=versions.get)
    assert versions[slot] > 1
    with open(workload.path("slots"), "r+b") as file:
        file.seek(slot * workload.slot_bytes)
        file.write(workload.slot_content(slot, versions[slot] - 1)[:512])


def flip_bit_in_slot(root, history, seed):
    workload, acked, _ = copy_of(root, history, seed, "slots0")
    slot = next(op[1] for _, op in workload.planned(acked) if op[0] == "write")
    flip(workload.path("slots"), slot * workload.slot_bytes + 300)


def swap_slots(root, history, seed):
    workload, acked, _ = copy_of(root, history, seed, "slots0")
    written = sorted({op[1] for _, op in workload.planned(acked) if op[0] == "write"})
    data = workloads.read_all(workload.path("slots"))
    size = workload.slot_bytes
    with open(workload.path("slots"), "r+b") as file:
        file.seek(written[0] * size)
        file.write(data[written[1] * size:written[1] * size + size])


def half_replaced_file(root, history, seed):
    workload, _, _ = copy_of(root, history, seed, "replace0")
    name = max((n for n in os.listdir(workload.root) if not n.endswith(".new")),
               key=lambda n: os.path.getsize(workload.path(n)))
    os.truncate(workload.path(name), os.path.getsize(workload.path(name)) // 2)


def old_version_of_replaced_file(root, history, seed):
    workload, acked, _ = copy_of(root, history, seed, "replace0")
    versions = {}
    for _, (_, name, version, _) in workload.planned(acked):
        versions.setdefault(name, []).append(version)
    name = max(versions, key=lambda n: len(versions[n]))
    with open(workload.path(f"file{name}"), "wb") as file:
        file.write(workload.version(name, versions[name][-2]))


def unknown_file(root, history, seed):
    with open(os.path.join(root, "replace0", "stranger"), "wb"):
        pass


def truncate_of_data_lost(root, history, seed):
    path = os.path.join(root, "dataops0", "data")
    os.truncate(path, os.path.getsize(path) + 1000000)


def flip_bit_in_data(root, history, seed):
    path = os.path.join(root, "dataops0", "data")
    with open(path, "ab") as file:
        pass
    data = workloads.read_all(path)
    flip(path, next(i for i, byte in enumerate(data) if byte))


def files_of(root):
    top = os.path.join(root, "namespace0")
    return sorted(os.path.join(d, n) for d, _, names in os.walk(top) for n in names
                  if not os.path.islink(os.path.join(d, n)))


def remove_file(root, history, seed):
    os.unlink(files_of(root)[0])


def old_name_is_back(root, history, seed):
    path = files_of(root)[0]
    os.rename(path, path + "-older")


def both_names_of_a_rename(root, history, seed):
    path = files_of(root)[0]
    os.link(path, path + "-older")


def mode_lost(root, history, seed):
    os.chmod(files_of(root)[-1], 0o000)


def attribute_lost(root, history, seed):
    path = files_of(root)[-1]
    os.setxattr(path, "user.number", b"987654321")


def content_of_file_lost(root, history, seed):
    # Not the newest one: it may have been under way, and then its content is open.
    older = sorted(files_of(root), key=os.path.getmtime)[:-1]
    path = max(older, key=os.path.getsize)
    with open(path, "r+b") as file:
        file.write(bytes(os.path.getsize(path)))


def directory_lost(root, history, seed):
    shutil.rmtree(os.path.join(root, "namespace0"))


DAMAGES = (
    drop_acknowledged_record, zero_acknowledged_record, stale_bytes_after_the_end,
    remove_acknowledged_log, revert_slot, flip_bit_in_slot, swap_slots, half_replaced_file,
    old_version_of_replaced_file, unknown_file, truncate_of_data_lost, flip_bit_in_data,
    remove_file, old_name_is_back, both_names_of_a_rename, mode_lost, attribute_lost,
    content_of_file_lost, directory_lost,
)


def main(seed, repetitions=3):
    passed = failed = 0
    for repetition in range(repetitions):
        scratch = tempfile.mkdtemp(prefix="weir-kill-selftest.", dir="/var/tmp")
        try:
            root, history = os.path.join(scratch, "root"), os.path.join(scratch, "history")
            run_seed = f"{seed}/{repetition}"
            for process in workloads.start(root, history, run_seed, seconds=0.6).values():
                process.join()
            for clean in (False, True):
                count, damages = workloads.check_all(root, history, run_seed, clean)
                good = count > 100 and not damages
                passed, failed = passed + good, failed + (not good)
                say(f"{'ok' if good else 'FAIL'}: a true history of {count} operations "
                    f"is accepted {damages}")
            for damage in DAMAGES:
                copy = os.path.join(scratch, "copy")
                shutil.copytree(root, copy, symlinks=True)
                relink(root, copy)
                damage(copy, history, run_seed)
                _, damages = workloads.check_all(copy, history, run_seed)
                shutil.rmtree(copy)
                passed, failed = passed + bool(damages), failed + (not damages)
                if not damages:
                    say(f"FAIL: {damage.__name__} was not noticed (run {repetition})")
                elif repetition == 0:
                    say(f"ok: {damage.__name__} is noticed: {damages[0][:150]}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    say(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def relink(root, copy):
    """Makes hard links of the copies of hard links; copytree has made separate files."""
    first = {}
    for directory, _, names in os.walk(root):
        for name in names:
            source = os.path.join(directory, name)
            info = os.lstat(source)
            target = os.path.join(copy, os.path.relpath(source, root))
            if info.st_nlink > 1:
                if info.st_ino in first:
                    os.unlink(target)
                    os.link(first[info.st_ino], target)
                else:
                    first[info.st_ino] = target
