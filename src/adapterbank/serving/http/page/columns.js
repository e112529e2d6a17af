// The columns of a data file, read in the browser from its first bytes. Knows no server.

import { beginning } from "./decoding.js";

const ROWS = 3;
const LOOKED_AT = 20; // rows in which a separator must fit
const SEPARATORS = [",", ";", "\t", "|"];
const PAIRS = [["sentence1", "sentence2"], ["premise", "hypothesis"], ["question1", "question2"], ["question", "sentence"],
  ["question", "context"], ["question", "passage"], ["query", "document"], ["query", "passage"], ["text_a", "text_b"], ["text1", "text2"], ["text", "text_pair"]];
const TEXTS = ["text", "sentence", "content", "review", "tweet", "message", "body", "document", "utterance", "comment",
  "description", "headline", "title", "question", "query", "input", "abstract", "tokens", "words"];
const LABELS = ["label", "labels", "gold_label", "answers", "class", "category", "target", "targets", "sentiment", "emotion", "intent",
  "topic", "score", "rating", "stars", "similarity", "is_duplicate", "quality", "tag", "tags", "genre", "genres", "y", "answer",
  "ner_tags", "upos", "pos_tags", "entities", "spans"];
const CONLL = ["conll", "iob", "bio", "txt"];
const CONLLU = { tokens: 1, lemmas: 2, upos: 3, xpos: 4, feats: 5, deprels: 7 };

export const formatOf = (name) => name.toLowerCase().split(".").pop();

// Read rows of delimited text: quotes may hold the delimiter, line ends and doubled quotes.
export function delimited(text, delimiter, limit) {
  const rows = [];
  let row = [], cell = "", quoted = false;
  for (let k = 0; k < text.length && rows.length < limit; k += 1) {
    const letter = text[k];
    if (quoted) {
      if (letter !== '"') cell += letter;
      else if (text[k + 1] === '"') { cell += '"'; k += 1; } else quoted = false;
    } else if (letter === '"' && cell === "") quoted = true;
    else if (letter === delimiter) { row.push(cell); cell = ""; }
    else if (letter === "\n") {
      row.push(cell.replace(/\r$/, ""));
      if (row.length > 1 || row[0] !== "") rows.push(row);
      row = []; cell = "";
    } else cell += letter;
  }
  if (rows.length < limit && (cell || row.length)) rows.push([...row, cell.replace(/\r$/, "")]);
  return rows;
}

// The separator of the fields: as stated, as Excel's first line says, or the one that fits the first rows.
function separated(text, usual, stated) {
  const excel = /^"?sep=(.)"?\r?\n/.exec(text), rest = excel ? text.slice(excel[0].length) : text;
  if (stated || excel) return [stated || excel[1], rest];
  const fits = SEPARATORS.filter((mark) => {
    const [first = [], ...rows] = delimited(rest, mark, LOOKED_AT);
    return first.length > 1 && rows.every((row) => row.length === first.length);
  });
  return [fits.length && !fits.includes(usual) ? fits[0] : usual, rest];
}

function objects(text, limit) {
  const found = [];
  for (const line of text.split("\n").slice(0, limit)) {
    try { found.push(JSON.parse(line)); } catch { break; }
  }
  return found.filter((one) => one && typeof one === "object" && !Array.isArray(one));
}

// The words of the first sentences, each the fields of its line; a line of blanks divides sentences as an empty one does.
function sentences(text, isWord, limit) {
  const found = [[]];
  for (const line of text.split("\n")) {
    if (line.trim() === "") { if (found.at(-1).length) found.push([]); }
    else if (isWord(line)) found.at(-1).push(line.includes("\t") ? line.split("\t").map((field) => field.trim()) : line.trim().split(/ +/));
    if (found.length > limit) break;
  }
  return found.filter((one) => one.length).slice(0, limit);
}

const spread = (found, places) => found.map((words) => places.map((place) => words.map((fields) => fields[place] ?? "").join(" ")));

function conll(text, limit) {
  const found = sentences(text, (line) => !line.startsWith("# ") && !line.startsWith("-DOCSTART-"), limit);
  const width = found[0]?.[0].length ?? 0, places = Array.from({ length: width }, (_, k) => k);
  if (width < 2) return { columns: [], rows: [] };
  return { columns: places.map((k) => (k ? (k === width - 1 ? "tags" : `column_${k + 1}`) : "tokens")), rows: spread(found, places) };
}

function conllu(text, limit) {
  const found = sentences(text, (line) => /^[0-9]+\t/.test(line), limit);
  return { columns: found.length ? Object.keys(CONLLU) : [], rows: spread(found, Object.values(CONLLU)) };
}

export async function columnsOf(file, { separator = "", header = true } = {}) {
  const format = formatOf(file.name);
  if (!["csv", "tsv", "jsonl", "conllu", ...CONLL].includes(format)) return { columns: [], rows: [] };
  const text = await beginning(file);
  if (CONLL.includes(format)) return conll(text, ROWS);
  if (format === "conllu") return conllu(text, ROWS);
  if (format === "jsonl") {
    const found = objects(text, ROWS), columns = [...new Set(found.flatMap(Object.keys))];
    return { columns, rows: found.map((one) => columns.map((name) => (typeof one[name] === "string" ? one[name] : JSON.stringify(one[name]) ?? ""))) };
  }
  const [mark, rest] = separated(text, format === "tsv" ? "\t" : ",", separator);
  const [columns = [], ...rows] = delimited(rest, mark, ROWS + 1);
  if (!header) return { columns: columns.map((_, k) => String(k + 1)), rows: [columns, ...rows].slice(0, ROWS) };
  while (columns.at(-1) === "") columns.pop(); // spreadsheets add columns without a name
  return { columns, rows };
}

export function guess(columns) {
  const by = new Map(columns.map((name) => [name.trim().toLowerCase(), name]));
  const both = PAIRS.find(([a, b]) => by.has(a) && by.has(b));
  const label = by.get(LABELS.find((name) => by.has(name))) ?? columns.at(-1);
  const text = both ? by.get(both[0]) : by.get(TEXTS.find((name) => by.has(name))) ?? columns.find((name) => name !== label) ?? columns[0];
  return { text, pair: both ? by.get(both[1]) : "", label };
}
