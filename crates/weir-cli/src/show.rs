//! Attributes as text and as JSON.

use serde_json::{Value, json};
use weir::{Attr, FileType, Timestamp};

/// The type's word.
pub fn type_name(file_type: FileType) -> &'static str {
    match file_type {
        FileType::Regular => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "symlink",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::CharDevice => "char-device",
        FileType::BlockDevice => "block-device",
    }
}

/// `1 file`, `2 files`.
pub fn counted(count: u64, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// `drwxr-xr-x`.
pub fn mode_text(attr: &Attr) -> String {
    let kind = match attr.file_type {
        FileType::Regular => '-',
        FileType::Directory => 'd',
        FileType::Symlink => 'l',
        FileType::Fifo => 'p',
        FileType::Socket => 's',
        FileType::CharDevice => 'c',
        FileType::BlockDevice => 'b',
    };
    let mut text = String::from(kind);
    let special = [(0o4000, 's', 'S'), (0o2000, 's', 'S'), (0o1000, 't', 'T')];
    for (index, (bit, with, without)) in special.into_iter().enumerate() {
        let bits = attr.permissions >> (6 - 3 * index);
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & 1 != 0, attr.permissions & bit != 0) {
            (true, true) => with,
            (false, true) => without,
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// `2026-11-21T21:33:07.123456789Z`: RFC 3339, in UTC.
pub fn time_text(time: Timestamp) -> String {
    let days = time.seconds.div_euclid(86_400);
    let second_of_day = time.seconds.rem_euclid(86_400);
    let (year, month, day) = civil_date(days);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{:09}Z",
        second_of_day / 3600,
        second_of_day / 60 % 60,
        second_of_day % 60,
        time.nanoseconds
    )
}

/// Year, month and day of a day counted from 1970, in the Gregorian calendar.
fn civil_date(days: i64) -> (i64, i64, i64) {
    // Eras of 400 years that start on 1 March, so that the leap day is the last of its year.
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// Major and minor number of a device node.
pub fn device_numbers(rdev: u32) -> (u32, u32) {
    (rdev >> 8 & 0xfff, rdev & 0xff | rdev >> 12 & 0xfff00)
}

/// Bytes that should be text: as a string, and exactly (in hex) where that loses something.
pub fn text_json(bytes: &[u8]) -> Value {
    match std::str::from_utf8(bytes) {
        Ok(text) => json!(text),
        Err(_) => json!({ "lossy": String::from_utf8_lossy(bytes), "hex": hex(bytes) }),
    }
}

/// JSON as text, in lines if `pretty`, with what a terminal would obey escaped: JSON itself leaves some of it.
pub fn json_text(value: &Value, pretty: bool) -> String {
    let text = if pretty { format!("{value:#}\n") } else { format!("{value}\n") };
    let escaped = |character: char| match character {
        '\n' => "\n".to_owned(),
        control if control.is_control() => format!("\\u{:04x}", u32::from(control)),
        other => other.to_string(),
    };
    if text.chars().any(|one| one.is_control() && one != '\n') {
        return text.chars().map(escaped).collect();
    }
    text
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

/// All attributes.
pub fn attr_json(attr: &Attr) -> Value {
    json!({
        "inode": attr.ino,
        "type": type_name(attr.file_type),
        "mode": format!("{:04o}", attr.permissions),
        "links": attr.links,
        "uid": attr.uid,
        "gid": attr.gid,
        "size_bytes": attr.size_bytes,
        "allocated_bytes": attr.blocks.saturating_mul(4096),
        "rdev": attr.rdev,
        "atime": time_text(attr.atime),
        "mtime": time_text(attr.mtime),
        "ctime": time_text(attr.ctime),
        "btime": time_text(attr.btime),
        "change_counter": attr.change_counter,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> String {
        time_text(Timestamp { seconds, nanoseconds: 5 })
    }

    #[test]
    fn dates_are_right_across_leap_years_and_before_1970() {
        assert_eq!(at(0), "1970-01-01T00:00:00.000000005Z");
        assert_eq!(at(-1), "1969-12-31T23:59:59.000000005Z");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000000005Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.000000005Z");
        assert_eq!(at(1_700_000_000), "2023-11-14T22:13:20.000000005Z");
    }

    #[test]
    fn special_bits_show_over_the_execute_bits() {
        let attr = |permissions| Attr {
            ino: 1,
            file_type: FileType::Directory,
            permissions,
            links: 1,
            uid: 0,
            gid: 0,
            size_bytes: 0,
            blocks: 0,
            rdev: 0,
            atime: Timestamp::default(),
            mtime: Timestamp::default(),
            ctime: Timestamp::default(),
            btime: Timestamp::default(),
            change_counter: 0,
        };
        assert_eq!(mode_text(&attr(0o755)), "drwxr-xr-x");
        assert_eq!(mode_text(&attr(0o7777)), "drwsrwsrwt");
        assert_eq!(mode_text(&attr(0o7666)), "drwSrwSrwT");
        assert_eq!(mode_text(&attr(0)), "d---------");
    }

    #[test]
    fn no_terminal_obeys_what_is_in_a_json_string_and_a_reader_finds_it() {
        let value = json!({ "name": "a\u{9b}31m\u{7f}\x1b\n" });
        for pretty in [false, true] {
            let text = json_text(&value, pretty);
            assert!(!text.chars().any(|one| one.is_control() && one != '\n'), "{text:?}");
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
        }
    }

    #[test]
    fn names_that_are_no_text_keep_their_bytes_in_json() {
        assert_eq!(text_json(b"abc"), json!("abc"));
        assert_eq!(text_json(b"a\xff")["hex"], json!("61ff"));
    }
}
