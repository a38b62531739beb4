//! Memory available to this process: the machine's, or less if a control group limits it. The only reader of these values;
//! [`memory`](super::memory) counts the library's own use.
//!
//! Any group from the process's own up to the root may have a limit, in either version of control groups. The root of the hierarchy may be
//! mounted anywhere or not at all: a container often sees only its own group. `/proc/self/cgroup` names the group, and
//! `/proc/self/mountinfo` gives its location.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use serde::Serialize;

/// The limit of a control group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// Upper limit of bytes for all processes of the group together.
    pub bytes: u64,
    /// The file that holds the limit.
    pub file: String,
}

/// Memory available to this process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostMemory {
    /// Total bytes: those of the machine, or of the strictest limit if that is lower.
    pub total: u64,
    /// Unused bytes. File caches that can be dropped count as unused.
    pub available: u64,
    /// The strictest limit, if one is below the machine's memory.
    pub limit: Option<Limit>,
}

/// Reads the values from the system. `None` if it does not provide them.
pub fn read() -> Option<HostMemory> {
    read_at(Path::new("/")).or_else(|| {
        let total = physical()?;
        Some(HostMemory {
            total,
            available: total,
            limit: None,
        })
    })
}

fn physical() -> Option<u64> {
    // SAFETY: sysconf only reads numbers.
    let (pages, page) = unsafe {
        (
            libc::sysconf(libc::_SC_PHYS_PAGES),
            libc::sysconf(libc::_SC_PAGESIZE),
        )
    };
    u64::try_from(pages)
        .ok()?
        .checked_mul(u64::try_from(page).ok()?)
}

/// Reads the values from a system whose files are below `root`.
fn read_at(root: &Path) -> Option<HostMemory> {
    let meminfo = fs::read(root.join("proc/meminfo")).ok()?;
    let kib = |name| value(&meminfo, name)?.checked_mul(1024);
    let machine = kib("MemTotal:")?;
    let mut memory = HostMemory {
        total: machine,
        available: kib("MemAvailable:").unwrap_or(machine).min(machine),
        limit: None,
    };
    for level in levels(root) {
        let Some(limit) = level.limit else { continue };
        let left = limit.bytes.saturating_sub(level.used);
        if limit.bytes < machine {
            memory.available = memory.available.min(left);
        }
        if limit.bytes < memory.total {
            memory.total = limit.bytes;
            memory.limit = Some(limit);
        }
    }
    memory.available = memory.available.min(memory.total);
    Some(memory)
}

/// A control group that this process belongs to, directly or through a subgroup.
struct Level {
    limit: Option<Limit>,
    /// Bytes in use, without what the system drops first.
    used: u64,
}

/// The version of a hierarchy of control groups.
#[derive(Clone, Copy, PartialEq)]
enum Version {
    One,
    Two,
}

/// Mount point of a hierarchy.
struct Mount {
    version: Version,
    /// The group that is mounted, as `/proc/self/cgroup` names it.
    group: PathBuf,
    at: PathBuf,
}

/// The process's groups, from the root downwards. Among equal limits a configured one counts, not one derived from statistics.
fn levels(root: &Path) -> Vec<Level> {
    let read = |path: &str| fs::read(root.join(path)).unwrap_or_default();
    let (groups, mounts) = (read("proc/self/cgroup"), read("proc/self/mountinfo"));
    let mut levels = Vec::new();
    for mount in lines(&mounts).filter_map(Mount::parse) {
        let Some(group) = lines(&groups).find_map(|line| group_of(line, mount.version)) else {
            continue;
        };
        let top = root.join(mount.at.strip_prefix("/").unwrap_or(&mount.at));
        // A group outside the mounted one cannot be reached there; the mounted one is the closest.
        let below = match group.strip_prefix(&mount.group) {
            Ok(below)
                if below
                    .components()
                    .all(|c| matches!(c, Component::Normal(_))) =>
            {
                below
            }
            _ => Path::new(""),
        };
        levels.extend(
            below
                .ancestors()
                .map(|group| level(&top.join(group), mount.version, group == below)),
        );
    }
    levels.reverse();
    levels
}

fn level(folder: &Path, version: Version, is_own: bool) -> Level {
    let read = |name: &str| fs::read(folder.join(name)).unwrap_or_default();
    let number = |name: &str| first_number(&read(name));
    let path = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let limit = |name: &str| {
        let (bytes, file) = (number(name)?, path(name));
        Some(Limit { bytes, file })
    };
    let stat = read("memory.stat");
    let (limits, used, cache) = match version {
        // Exceeding `high` does not end a process, but throttles it almost to a halt.
        Version::Two => (
            [limit("memory.max"), limit("memory.high")],
            "memory.current",
            "inactive_file",
        ),
        // Ancestors count only if hierarchical accounting is on. The group's own statistics give the strictest limit of all that count,
        // including unmounted ones.
        Version::One => {
            let counts = is_own || number("memory.use_hierarchy") != Some(0);
            let above = value(&stat, "hierarchical_memory_limit").map(|bytes| Limit {
                bytes,
                file: path("memory.stat"),
            });
            (
                [
                    limit("memory.limit_in_bytes").filter(|_| counts),
                    above.filter(|_| is_own),
                ],
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        }
    };
    Level {
        limit: limits.into_iter().flatten().min_by_key(|limit| limit.bytes),
        used: number(used)
            .unwrap_or(0)
            .saturating_sub(value(&stat, cache).unwrap_or(0)),
    }
}

impl Mount {
    /// Parses a line of mountinfo; `None` unless its hierarchy limits memory.
    fn parse(line: &[u8]) -> Option<Mount> {
        let fields: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
        let dash = fields.iter().position(|&field| field == b"-")?;
        let (&group, &at) = (fields.get(3)?, fields.get(4)?);
        let options = *fields.get(dash + 3)?;
        let version = match *fields.get(dash + 1)? {
            b"cgroup2" => Version::Two,
            b"cgroup" if options.split(|&byte| byte == b',').any(|o| o == b"memory") => {
                Version::One
            }
            _ => return None,
        };
        let [group, at] = [group, at].map(unescaped);
        Some(Mount { version, group, at })
    }
}

/// The group in a line of `/proc/self/cgroup`, if its hierarchy limits memory in this version.
fn group_of(line: &[u8], version: Version) -> Option<&Path> {
    let mut fields = line.splitn(3, |&byte| byte == b':');
    let (number, controllers) = (fields.next()?, fields.next()?);
    let is_meant = match version {
        Version::Two => number == b"0" && controllers.is_empty(),
        Version::One => controllers
            .split(|&byte| byte == b',')
            .any(|c| c == b"memory"),
    };
    is_meant.then_some(Path::new(OsStr::from_bytes(fields.next()?)))
}

/// Unescapes a path of mountinfo, which has some characters as `\` and three octal digits.
fn unescaped(field: &[u8]) -> PathBuf {
    let mut path = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, after @ ..] = rest {
        rest = after;
        let digit = |at: usize| match after.get(at) {
            Some(digit @ b'0'..=b'7') => Some(u32::from(digit - b'0')),
            _ => None,
        };
        path.push(match (first, digit(0), digit(1), digit(2)) {
            (b'\\', Some(a), Some(b), Some(c)) => {
                rest = &after[3..];
                (a * 64 + b * 8 + c) as u8
            }
            _ => *first,
        });
    }
    PathBuf::from(OsStr::from_bytes(&path))
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|&byte| byte == b'\n')
}

fn first_number(text: &[u8]) -> Option<u64> {
    str::from_utf8(text)
        .ok()?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

/// The number after `name`, in a file with one name and number per line.
fn value(text: &[u8], name: &str) -> Option<u64> {
    let after = |line: &[u8]| -> Option<u64> {
        let rest = line.strip_prefix(name.as_bytes())?;
        rest.first()?
            .is_ascii_whitespace()
            .then(|| first_number(rest))?
    };
    lines(text).find_map(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Simulated system files.
    struct System(PathBuf);

    impl System {
        /// A machine of 64 GiB with 40 free.
        fn new(name: &str, cgroup: &str, mountinfo: &str) -> System {
            let root = std::env::temp_dir().join(format!("nvfp4-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&root);
            System(root)
                .with(
                    "proc/meminfo",
                    format!(
                        "MemTotal:       {} kB\nMemFree: 1 kB\nMemAvailable:   {} kB\n",
                        64 << 20,
                        40 << 20
                    ),
                )
                .with("proc/self/cgroup", cgroup)
                .with("proc/self/mountinfo", mountinfo)
        }

        fn with(self, path: &str, text: impl ToString) -> System {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text.to_string()).unwrap();
            self
        }

        /// Total and available gigabytes, and the file with the limit.
        fn says(&self) -> (u64, u64, Option<String>) {
            let memory = read_at(&self.0).unwrap();
            let file = memory.limit.map(|limit| {
                let below = Path::new(&limit.file).strip_prefix(&self.0).unwrap();
                below.to_str().unwrap().to_owned()
            });
            (memory.total / GIB, memory.available / GIB, file)
        }
    }

    impl Drop for System {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const V2: &str =
        "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const V1: &str = "31 23 0:28 / /sys/fs/cgroup ro shared:8 - tmpfs tmpfs ro\n\
                      32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
                      35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

    #[test]
    fn a_machine_without_limits() {
        for (cgroup, mounts) in [("0::/a\n", V2), ("4:memory:/a\n", V1), ("", "")] {
            let system = System::new("free", cgroup, mounts)
                .with("sys/fs/cgroup/a/memory.max", "max\n")
                .with(
                    "sys/fs/cgroup/memory/a/memory.limit_in_bytes",
                    9223372036854771712u64,
                );
            assert_eq!(system.says(), (64, 40, None));
        }
    }

    #[test]
    fn the_strictest_group_of_the_second_version_limits() {
        let own = "sys/fs/cgroup/user.slice/app.scope";
        let system = System::new("v2", "0::/user.slice/app.scope\n", V2)
            .with(&format!("{own}/memory.max"), 8 * GIB)
            .with(&format!("{own}/memory.current"), 5 * GIB)
            .with(
                &format!("{own}/memory.stat"),
                format!("anon 1\nactive_file 7\ninactive_file {}\n", 2 * GIB),
            );
        let file = |name| Some(format!("{own}/{name}"));
        assert_eq!(system.says(), (8, 5, file("memory.max")));
        // The parent group has a higher limit, but less left.
        let above = "sys/fs/cgroup/user.slice";
        let system = system
            .with(&format!("{above}/memory.max"), 16 * GIB)
            .with(&format!("{above}/memory.current"), 13 * GIB);
        assert_eq!(system.says(), (8, 3, file("memory.max")));
        let system = system.with(&format!("{own}/memory.high"), 7 * GIB);
        assert_eq!(system.says(), (7, 3, file("memory.high")));
        let system = system.with(&format!("{above}/memory.max"), 6 * GIB);
        let limit = Some(format!("{above}/memory.max"));
        assert_eq!(system.says(), (6, 0, limit));
    }

    #[test]
    fn groups_of_the_first_version_limit_those_below_unless_told_not_to() {
        let own = "sys/fs/cgroup/memory/a/b";
        let system = System::new("v1", "9:cpu:/other\n4:cpuset,memory:/a/b\n0::/\n", V1)
            .with(&format!("{own}/memory.limit_in_bytes"), 10 * GIB)
            .with(&format!("{own}/memory.usage_in_bytes"), 4 * GIB)
            .with(
                &format!("{own}/memory.stat"),
                format!(
                    "inactive_file 5\nhierarchical_memory_limit {}\ntotal_inactive_file {GIB}\n",
                    10 * GIB
                ),
            );
        let file = |path: &str| Some(format!("sys/fs/cgroup/memory/{path}"));
        assert_eq!(system.says(), (10, 7, file("a/b/memory.limit_in_bytes")));
        let above = "sys/fs/cgroup/memory/a";
        let system = system
            .with(&format!("{above}/memory.limit_in_bytes"), 6 * GIB)
            .with(&format!("{above}/memory.usage_in_bytes"), 5 * GIB)
            .with(&format!("{above}/memory.use_hierarchy"), 1);
        assert_eq!(system.says(), (6, 1, file("a/memory.limit_in_bytes")));
        // As in the kernel: the statistics of the group include the parent's limit.
        let system = system.with(
            &format!("{own}/memory.stat"),
            format!(
                "hierarchical_memory_limit {}\ntotal_inactive_file {GIB}\n",
                6 * GIB
            ),
        );
        assert_eq!(system.says(), (6, 1, file("a/memory.limit_in_bytes")));
        let system = system.with(
            &format!("{own}/memory.stat"),
            format!(
                "hierarchical_memory_limit {}\ntotal_inactive_file {GIB}\n",
                10 * GIB
            ),
        );
        let system = system.with(&format!("{above}/memory.use_hierarchy"), 0);
        assert_eq!(system.says(), (10, 7, file("a/b/memory.limit_in_bytes")));
    }

    /// A container sees its own group as the root of the mount; higher limits show only in statistics.
    #[test]
    fn limits_above_what_is_mounted() {
        let mount = "35 31 0:32 /docker/c0 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let system = System::new("docker", "4:memory:/docker/c0\n", mount)
            .with(
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                9223372036854771712u64,
            )
            .with("sys/fs/cgroup/memory/memory.usage_in_bytes", GIB)
            .with(
                "sys/fs/cgroup/memory/memory.stat",
                format!("hierarchical_memory_limit {}\n", 3 * GIB),
            );
        let file = Some("sys/fs/cgroup/memory/memory.stat".to_owned());
        assert_eq!(system.says(), (3, 2, file));
    }

    /// Group names that lead out of the mount, or contain spaces.
    #[test]
    fn groups_with_strange_names() {
        let limit = |system: System, path: &str| {
            let system = system.with(&format!("{path}/memory.max"), 2 * GIB);
            let expected = (2, 2, Some(format!("{path}/memory.max")));
            assert_eq!(system.says(), expected);
        };
        let outside = System::new("outside", "0::/../elsewhere\n", V2)
            .with("sys/fs/elsewhere/memory.max", GIB);
        limit(outside, "sys/fs/cgroup");
        let mounted = V2.replace(" / /sys/fs/cgroup ", " /a\\040b /mnt/c\\134d\\040e ");
        let spaced = System::new("spaced", "0::/a b/c:d\n", &mounted);
        limit(spaced, "mnt/c\\d e/c:d");
    }

    #[test]
    fn this_machine_tells() {
        let memory = read().unwrap();
        assert!(memory.available <= memory.total && memory.total > 0);
        assert!(memory.total <= physical().unwrap());
        assert!(read_at(Path::new("/nowhere")).is_none());
    }
}
