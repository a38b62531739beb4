// A reader of the JSON that the library writes, and a writer of texts. netstandard2.0 has none, and a package for this would be a
// dependency of every host.

using System;
using System.Collections.Generic;
using System.Globalization;
using System.Text;

namespace LibNVFP4
{
    /// Objects become dictionaries, arrays lists, numbers long or double, and null null.
    internal sealed class Json
    {
        readonly string text;
        int at;

        Json(string text)
        {
            this.text = text;
        }

        internal static Dictionary<string, object> Object(string text) => (Dictionary<string, object>)new Json(text).Value();

        internal static List<object> List(string text) => (List<object>)new Json(text).Value();

        /// The text at a name, or null where there is none.
        internal static string Text(Dictionary<string, object> members, string name) =>
            members.TryGetValue(name, out object value) ? (string)value : null;

        /// Writes a text in quotes.
        internal static void Write(StringBuilder to, string text)
        {
            to.Append('"');
            foreach (char c in text)
                if (c == '"' || c == '\\')
                    to.Append('\\').Append(c);
                else if (c < ' ')
                    to.Append("\\u").Append(((int)c).ToString("x4", CultureInfo.InvariantCulture));
                else
                    to.Append(c);
            to.Append('"');
        }

        object Value()
        {
            switch (Next())
            {
                case '{':
                    var members = new Dictionary<string, object>();
                    at++;
                    while (Next() != '}')
                    {
                        string name = String();
                        Expect(':');
                        members[name] = Value();
                        if (Next() == ',')
                            at++;
                    }
                    at++;
                    return members;
                case '[':
                    var items = new List<object>();
                    at++;
                    while (Next() != ']')
                    {
                        items.Add(Value());
                        if (Next() == ',')
                            at++;
                    }
                    at++;
                    return items;
                case '"':
                    return String();
                case 't':
                    at += 4;
                    return true;
                case 'f':
                    at += 5;
                    return false;
                case 'n':
                    at += 4;
                    return null;
                default:
                    return Number();
            }
        }

        char Next()
        {
            while (at < text.Length && char.IsWhiteSpace(text[at]))
                at++;
            if (at == text.Length)
                throw new FormatException("the library's JSON ends early");
            return text[at];
        }

        void Expect(char c)
        {
            if (Next() != c)
                throw new FormatException("the library's JSON has '" + text[at] + "' at " + at + " instead of '" + c + "'");
            at++;
        }

        string String()
        {
            Expect('"');
            var result = new StringBuilder();
            for (;;)
            {
                char c = text[at++];
                if (c == '"')
                    return result.ToString();
                if (c != '\\')
                {
                    result.Append(c);
                    continue;
                }
                c = text[at++];
                switch (c)
                {
                    case 'b': result.Append('\b'); break;
                    case 'f': result.Append('\f'); break;
                    case 'n': result.Append('\n'); break;
                    case 'r': result.Append('\r'); break;
                    case 't': result.Append('\t'); break;
                    case 'u':
                        result.Append((char)int.Parse(text.Substring(at, 4), NumberStyles.HexNumber, CultureInfo.InvariantCulture));
                        at += 4;
                        break;
                    default: result.Append(c); break;
                }
            }
        }

        object Number()
        {
            int from = at;
            while (at < text.Length && "+-.eE0123456789".IndexOf(text[at]) >= 0)
                at++;
            string number = text.Substring(from, at - from);
            if (long.TryParse(number, NumberStyles.AllowLeadingSign, CultureInfo.InvariantCulture, out long whole))
                return whole;
            if (number.Length == 0)
                throw new FormatException("the library's JSON has '" + text[at] + "' at " + at + " where a value should be");
            return double.Parse(number, NumberStyles.Float, CultureInfo.InvariantCulture);
        }
    }
}
