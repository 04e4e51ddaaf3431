"""What is killed: a Weir mount, whose server gets kill -9, or, as a proof of the suite itself,
a kernel file system on a loop device that is shut down without writing its log."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import faulty_host

SHUTDOWN_IOCTL = 0x8004587D  # XFS_IOC_GOINGDOWN, which ext4 knows too
SHUTDOWN_WITHOUT_LOG = (2).to_bytes(4, "little")
MOUNT_LIMIT_SECONDS = 120


class TargetError(Exception):
    """The target does not do what the suite asks for."""


def run(*command, ok=(0,), limit=300):
    done = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", timeout=limit, check=False)
    if done.returncode not in ok:
        raise TargetError(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}")
    return done


def mounted_at(directory):
    with open("/proc/self/mounts", encoding="utf-8") as file:
        return any(line.split()[1] == directory for line in file)


def wait_until(condition, limit_seconds, what):
    deadline = time.monotonic() + limit_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TargetError(f"{what}: not within {limit_seconds} s")
        time.sleep(0.005)


def end_processes_below(directory):
    """kill -9 for every process whose working directory is below `directory`."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                where = os.readlink(f"/proc/{entry}/cwd")
                if where == directory or where.startswith(directory + "/"):
                    os.kill(int(entry), signal.SIGKILL)
            except OSError:
                pass  # it has ended meanwhile, or is a kernel thread


class FaultyHost:
    """The host file system of faulty_host.py, with the image file on it."""

    def __init__(self, work):
        self.backing = os.path.join(work, "backing")
        self.directory = os.path.join(work, "faulty")
        self.volume = os.path.join(self.directory, "volume")
        self.socket = os.path.join(work, "faulty.socket")
        self.process = None

    def start(self):
        """Serves the image, which has been made at `backing`."""
        os.makedirs(self.directory, exist_ok=True)
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "faulty_host.py")
        self.process = subprocess.Popen([sys.executable, program, "serve", self.backing,
                                         self.directory, self.socket])
        wait_until(lambda: os.path.exists(self.socket), 20, "the faulty host")

    def tell(self, *words):
        return faulty_host.tell(self.socket, *map(str, words))

    def stop(self):
        if self.process is not None:
            subprocess.run(["umount", "-l", self.directory], check=False, capture_output=True)
            self.process.kill()
            self.process.wait()


class WeirTarget:
    """`weir mount` in the foreground, so that its process id is known."""

    loads_end_first = False

    def __init__(self, binary, volume, directory, log, mount_args=(), host=None):
        self.binary, self.volume, self.directory = os.path.realpath(binary), volume, directory
        self.log, self.mount_args, self.server = log, list(mount_args), None
        self.host = host
        open(log, "ab").close()

    def create(self, size):
        run(self.binary, "create", self.host.backing if self.host else self.volume, "--size", size)
        if self.host:
            self.host.start()

    def alive(self):
        return self.server.poll() is None

    def start_mount(self):
        output = open(self.log, "ab")
        output.write(b"--- mount\n")
        output.flush()
        self.server = subprocess.Popen(
            [self.binary, "mount", self.volume, self.directory, *self.mount_args],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
        output.close()

    def mount(self):
        self.start_mount()
        wait_until(lambda: mounted_at(self.directory) or self.server.poll() is not None,
                   MOUNT_LIMIT_SECONDS, "the mount")
        if self.server.poll() is not None:
            raise TargetError(f"weir mount ended with {self.server.returncode}:\n{self.log_tail()}")
        os.statvfs(self.directory)

    def log_tail(self):
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-40:])

    def crash(self):
        if self.server.poll() is not None:
            raise TargetError(f"the server ended by itself with {self.server.returncode}:\n"
                              f"{self.log_tail()}")
        self.server.kill()
        self.server.wait()

    def power_cut(self, seed, percent):
        """The server dies and the host's volatile cache with it."""
        self.crash()
        return self.host.tell("cut", seed, percent)

    def crash_in_recovery(self, seconds):
        """Starts a mount and kills it, whatever it has reached after `seconds`."""
        self.start_mount()
        time.sleep(seconds)
        if self.server.poll() not in (None, 0):
            raise TargetError(f"weir mount ended with {self.server.returncode}:\n{self.log_tail()}")
        self.server.kill()
        self.server.wait()
        self.detach()

    def detach(self):
        """Takes the dead mount away."""
        while mounted_at(self.directory):
            if subprocess.run(["fusermount3", "-u", "-z", self.directory], check=False,
                              capture_output=True).returncode != 0:
                run("umount", "-l", self.directory)

    def unmount(self):
        run(self.binary, "umount", self.directory, limit=120)
        try:
            code = self.server.wait(60)
        except subprocess.TimeoutExpired as error:
            raise TargetError("the server runs on 60 s after the unmount") from error
        if code != 0:
            raise TargetError(f"the server ended with {code}:\n{self.log_tail()}")

    def fsck(self, ok=(0, 1)):
        return run(self.binary, "fsck", self.volume, ok=ok)

    def dry_run(self):
        """Checks and changes nothing: the recovery is left to the mount."""
        run(self.binary, "fsck", "--dry-run", self.volume)

    def complain(self):
        """What the server's log holds that no log should."""
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return [line.rstrip() for line in file if "panicked at" in line]

    def release(self):
        if self.server is not None and self.server.poll() is None:
            self.server.kill()
            self.server.wait()
        self.detach()
        if self.host:
            self.host.stop()


class LoopTarget:
    """XFS or ext4 on a loop device; a crash is the shutdown ioctl without a log flush.

    The shutdown is not one moment: XFS lets an O_DSYNC write return success whose log record
    it then drops. So the writers are killed just before, and none can log such a success.
    """

    loads_end_first = True

    def __init__(self, kind, volume, directory, host=None):
        self.kind, self.volume, self.directory, self.host = kind, volume, directory, host

    def create(self, size):
        image = self.host.backing if self.host else self.volume
        run("truncate", "-s", size, image)
        run(*{"xfs": ("mkfs.xfs", "-q"), "ext4": ("mkfs.ext4", "-q", "-F")}[self.kind], image)
        if self.host:
            self.host.start()

    def alive(self):
        return True

    def mount(self):
        run("mount", "-o", "loop", self.volume, self.directory)

    def crash(self):
        fd = os.open(self.directory, os.O_RDONLY)
        fcntl.ioctl(fd, SHUTDOWN_IOCTL, SHUTDOWN_WITHOUT_LOG)
        os.close(fd)

    def power_cut(self, seed, percent):
        self.crash()
        return self.host.tell("cut", seed, percent)

    def crash_in_recovery(self, _seconds):
        self.mount()
        self.crash()
        self.detach()

    def detach(self):
        def gone():
            return not mounted_at(self.directory) or \
                subprocess.run(["umount", self.directory], check=False,
                               capture_output=True).returncode == 0
        wait_until(gone, 30, "the unmount")

    def unmount(self):
        self.detach()

    def fsck(self, ok=(0, 1)):
        del ok  # a dirty log is replayed by the mount, not by the check
        if self.kind == "xfs":
            return run("xfs_repair", "-n", self.volume, ok=(0, 1, 2))
        return run("e2fsck", "-fp", self.volume, ok=(0, 1))

    def dry_run(self):
        """As for Weir, as far as these file systems have it."""
        if self.kind == "xfs":
            self.fsck()

    def complain(self):
        return []

    def release(self):
        if mounted_at(self.directory):
            subprocess.run(["umount", "-l", self.directory], check=False)
        if self.host:
            self.host.stop()


def say(text):
    print(text)
    sys.stdout.flush()
