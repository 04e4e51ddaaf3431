//! `dpkg`: each client installs packages of small files again and again, into a root of its own. It syncs every file that it unpacks, and
//! its database, before it says that a package is there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::process::{Working, program};
use super::{Cost, Place, Work};
use crate::error::{IoContext, LabResult};
use crate::experiments::load::{random_bytes, together};

const MISSING: &str = "dpkg is not installed; it is in the package 'dpkg'";
/// What a package holds.
const FILES: u64 = 10;
const FILE_BYTES: usize = 8 << 10;
/// So many are installed by one run of the program.
const PACKAGES: u64 = 4;

/// Installs until the time is over, at least once. A transaction is a package.
pub fn work(place: &Place<'_>) -> LabResult<Work> {
    let tools = (program("dpkg", MISSING)?, program("dpkg-deb", MISSING)?);
    let packages = (0..PACKAGES)
        .map(|number| package(place, &tools.1, number))
        .collect::<LabResult<Vec<PathBuf>>>()?;
    let roots = (0..place.clients).map(|n| root(&place.dir.join(n.to_string())));
    let roots = roots.collect::<LabResult<Vec<PathBuf>>>()?;
    let cost = Cost::start(place.env);
    let (counts, took) = together(place.clients, |n, begun| {
        let mut installed = 0;
        while installed == 0 || begun.elapsed() < place.time {
            place.env.cancel.check()?;
            install(place, &tools.0, &roots[n as usize], &packages)?;
            installed += PACKAGES;
        }
        Ok(installed)
    })?;
    let spent = cost.stop(place.env);
    let transactions = counts.iter().sum();
    let stored_bytes = transactions * FILES * FILE_BYTES as u64;
    Ok(Work { transactions, took, latencies: None, stored_bytes, spent })
}

/// Builds a package, not on the target.
fn package(place: &Place<'_>, tool: &Path, number: u64) -> LabResult<PathBuf> {
    let name = format!("weir-lab-{number}");
    let built = place.aside.join(format!("{name}.deb"));
    let tree = place.aside.join(&name);
    let files = tree.join("usr/share").join(&name);
    let control = format!(
        "Package: {name}\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@localhost>\n\
         Description: files\n"
    );
    let write = || -> std::io::Result<()> {
        fs::create_dir_all(tree.join("DEBIAN"))?;
        fs::write(tree.join("DEBIAN/control"), control)?;
        fs::create_dir_all(&files)?;
        for file in 0..FILES {
            let bytes = random_bytes(FILE_BYTES, place.env.seed + number * FILES + file);
            fs::write(files.join(file.to_string()), bytes)?;
        }
        Ok(())
    };
    write().during(|| format!("writing {}", tree.display()))?;
    let mut command = Command::new(tool);
    command.args(["-Znone", "--root-owner-group", "--build"]).arg(&tree).arg(&built);
    Working::start("dpkg-deb", command.stdin(Stdio::null()))?.finish(place.env.cancel)?;
    Ok(built)
}

/// Where a system is to be that has no packages yet.
fn root(dir: &Path) -> LabResult<PathBuf> {
    let database = dir.join("var/lib/dpkg");
    let make = || -> std::io::Result<()> {
        for part in ["updates", "info", "triggers"] {
            fs::create_dir_all(database.join(part))?;
        }
        fs::write(database.join("status"), "")
    };
    make().during(|| format!("making {}", database.display()))?;
    Ok(dir.to_path_buf())
}

fn install(place: &Place<'_>, tool: &Path, root: &Path, packages: &[PathBuf]) -> LabResult<()> {
    let mut command = Command::new(tool);
    command.arg("--root").arg(root);
    // As whoever runs the lab; there are no scripts that would need more.
    command.args(["--force-not-root", "--force-bad-path", "--log=/dev/null", "--install"]);
    // What is set on this machine to make it do without syncs is not to count.
    command.arg("--no-force-unsafe-io").args(packages);
    Working::start("dpkg", command.stdin(Stdio::null()))?.finish(place.env.cancel)?;
    Ok(())
}
