//! The current date, for templates.

use minijinja::ErrorKind;

/// The current time in UTC, formatted by `format`.
pub(super) fn strftime_now(format: &str) -> std::result::Result<String, minijinja::Error> {
    let seconds = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_secs());
    strftime(format, seconds).map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e))
}

/// `format` for the moment `seconds` after 1970 in UTC, with the directives that templates use to tell a model the date.
fn strftime(format: &str, seconds: u64) -> std::result::Result<String, String> {
    const DAYS: [&str; 7] = [
        "Thursday",
        "Friday",
        "Saturday",
        "Sunday",
        "Monday",
        "Tuesday",
        "Wednesday",
    ];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let (day, second) = (seconds / 86400, seconds % 86400);
    let (hour, minute) = (second / 3600, second / 60 % 60);
    let (year, month, date) = civil(day);
    let weekday = DAYS[(day % 7) as usize];
    let month_name = MONTHS[month as usize - 1];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        let padded = directive != Some('-');
        if !padded {
            directive = chars.next();
        }
        let number = |n: u64| {
            if padded {
                format!("{n:02}")
            } else {
                n.to_string()
            }
        };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => number(year % 100),
            Some('m') => number(month),
            Some('d') => number(date),
            Some('H') => number(hour),
            Some('I') => number((hour + 11) % 12 + 1),
            Some('M') => number(minute),
            Some('S') => number(second % 60),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                return Err(format!(
                    "strftime_now('{format}'): directive %{} is not known; Y y m d H I M S p B b A a work",
                    other.map(String::from).unwrap_or_default()
                ));
            }
        });
    }
    Ok(out)
}

/// Year, month and day of the `day`th day after 1970-01-01.
fn civil(day: u64) -> (u64, u64, u64) {
    let (mut year, mut left) = (1970, day);
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let lengths = [
        31,
        28 + u64::from(leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut month = 1;
    for length in lengths {
        if left < length {
            break;
        }
        left -= length;
        month += 1;
    }
    (year, month, left + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        // 2024-02-29 13:05:09 UTC.
        let t = 1_709_211_909;
        assert_eq!(
            strftime("%A %a %d %B %b %Y %y %m %H:%M:%S %I%p %-d%%", t).unwrap(),
            "Thursday Thu 29 February Feb 2024 24 02 13:05:09 01PM 29%"
        );
        assert_eq!(strftime("%Y-%m-%d", 0).unwrap(), "1970-01-01");
        assert_eq!(strftime("%Y-%m-%d", 4_107_542_399).unwrap(), "2100-02-28");
        assert_eq!(strftime("%Y-%m-%d", 4_107_542_400).unwrap(), "2100-03-01");
        let e = strftime("%Q", 0).unwrap_err();
        assert!(e.to_string().contains("%Q"), "{e}");
    }
}
