// The search of the list: words, and conditions on columns. No page in here.

const WORDS = ["id", "task", "domain", "query", "status", "error", "harness"];
const OTHER_NAMES = { steps: "critical_steps", subagents: "agents", it: "iteration" };
const CONDITION = /^([a-z_]+)(>=|<=|>|<|:|=)(.+)$/i;

/** The value of a column of a row; columns of reward parts go by the part's name. */
export function valueOf(row, column) {
  return column in row ? row[column] : row.parts[column];
}

/** "berlin reward<0.5 -status:answered" as a test of a row; every part must hold. */
export function matcher(text) {
  const tests = (text.match(/"[^"]*"|\S+/g) ?? []).map(testOf);
  return (row) => tests.every((test) => test(row));
}

function testOf(word) {
  if (word.length > 1 && word.startsWith("-")) {
    const test = testOf(word.slice(1));
    return (row) => !test(row);
  }
  const found = word.match(CONDITION);
  if (!found) {
    const wanted = word.replaceAll('"', "").toLowerCase();
    return (row) => WORDS.some((column) => String(row[column]).toLowerCase().includes(wanted));
  }
  const column = OTHER_NAMES[found[1].toLowerCase()] ?? found[1].toLowerCase();
  return compared(column, found[2], found[3].toLowerCase());
}

function compared(column, sign, wanted) {
  const number = Number(wanted);
  return (row) => {
    const value = valueOf(row, column);
    if (value === null || value === undefined) return false;
    if (sign === ":" || sign === "=") return typeof value === "number" ? value === number : String(value).toLowerCase().includes(wanted);
    return { ">": value > number, "<": value < number, ">=": value >= number, "<=": value <= number }[sign];
  };
}

/** A sorted copy; rows without a value come last whichever way it goes, equal ones stay in the order of the run. */
export function sorted(rows, column, down) {
  const keyed = rows.map((row, k) => [valueOf(row, column) ?? null, k, row]);
  const way = down ? -1 : 1;
  keyed.sort(([a, i], [b, j]) => {
    if (a === null || b === null) return (a === null) - (b === null) || i - j;
    return (a < b ? -way : a > b ? way : 0) || i - j;
  });
  return keyed.map(([, , row]) => row);
}
