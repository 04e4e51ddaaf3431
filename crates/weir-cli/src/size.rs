//! Sizes as people write and read them.

/// Parses `8G`, `512MiB`, `1.5T`, `4096`: binary multiples, with or without `B` or `iB`.
pub fn parse(text: &str) -> Result<u64, String> {
    let complaint =
        || format!("not a size: '{text}': use a number with K, M, G or T, such as 8G or 512MiB");
    let trimmed = text.trim();
    let digits_end =
        trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(digits_end);
    let shift = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        "p" | "pb" | "pib" => 50,
        _ => return Err(complaint()),
    };
    let multiple = 1_u64 << shift;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if whole.is_empty() || fraction.len() > 9 {
        return Err(complaint());
    }
    let whole: u64 = whole.parse().map_err(|_| complaint())?;
    let mut bytes = whole.checked_mul(multiple).ok_or_else(complaint)?;
    if !fraction.is_empty() {
        let digits: u128 = fraction.parse().map_err(|_| complaint())?;
        let part = u128::from(multiple) * digits / 10_u128.pow(fraction.len() as u32);
        bytes = bytes.checked_add(part as u64).ok_or_else(complaint)?;
    }
    Ok(bytes)
}

/// Three significant digits and a binary unit.
pub fn show(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary_whatever_the_spelling() {
        assert_eq!(parse("4096"), Ok(4096));
        for text in ["8G", "8g", "8GB", "8GiB", "8 GiB", "8.0G", "8192M"] {
            assert_eq!(parse(text), Ok(8 << 30), "{text}");
        }
        assert_eq!(parse("1.5K"), Ok(1536));
    }

    #[test]
    fn what_is_not_a_size_is_refused_with_an_example() {
        for text in ["", "G", "8X", "-1", "1e9", "1..2", ".5G", "99999999999999999999", "17000000T"]
        {
            let error = parse(text).unwrap_err();
            assert!(error.contains("such as 8G"), "{text}: {error}");
        }
    }

    #[test]
    fn shown_sizes_have_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (10_240, "10.0 KiB"),
            (1_047_552, "1.00 MiB"),
            (123 << 30, "123 GiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(show(bytes), text);
        }
    }
}
