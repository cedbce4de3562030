// Prints what the site's own search answers: node search.js WORKER INDEX, with a JSON list of queries on standard input. The worker is the
// program that a browser runs beside the page: it takes messages and posts its answers.
const fs = require("fs")

const [worker, index] = process.argv.slice(2)
const { config, docs } = JSON.parse(fs.readFileSync(index))
const [SETUP, QUERY, RESULT] = [0, 2, 3]
const answers = []
let receive

globalThis.self = globalThis
globalThis.addEventListener = (_, listener) => { receive = listener }
globalThis.postMessage = ({ type, data }) => { if (type === RESULT) answers.push(data.items) }
eval(fs.readFileSync(worker, "utf8"))

async function main() {
  await receive({ data: { type: SETUP, data: { config, docs, options: { suggest: false } } } })
  for (const query of JSON.parse(fs.readFileSync(0))) await receive({ data: { type: QUERY, data: query } })
  console.log(JSON.stringify(answers.map(pages => pages.map(page => page.map(section => section.location)))))
}

main()
