"""Capo's words and sentences: our own, since the paper prints none of its own.

A word of LISTS is one part of each row, in the order of itertools.product. Commas separate parts.
"""

LISTS = {
    "first": (
        "Ad,Bel,Cal,Dor,El,Fen,Gar,Hal,Is,Jor,Kel,Lor,Mar,Nor,Or,Per,Ros,Sil,Tam,Val",
        "a,ana,eth,ia,ina,ora,wen,lyn,da,ya,an,en,in,ion,ric,mond,ward,o,us,is",
    ),
    "middle": (
        "Ash,Bri,Cly,Dew,Em,Fly,Gle,Hea,Ir,Jun,Kir,Lea,Moo,Nel,Oak,Pel,Qui,Rai,Sta,Whe",
        "ber,cott,der,fer,gan,hart,kin,ler,ment,nor,per,rell,sby,ter,ther,ven,wick,win,yer,zel",
    ),
    "last": (
        "Alder,Bran,Corr,Dun,Ever,Fair,Grin,Hollo,Ing,Kettle,Lang,Merri,Nettle,Over,Pem,Quill,"
        "Raven,Stan,Thorn,Under,Vander,Wax,Yar,Zim,Oster",
        "bank,bard,bridge,brook,bury,by,combe,cote,croft,dale,den,field,gate,good,grave,ham,hill,"
        "house,land,lake,ley,lock,low,man,mere,more,port,ridge,row,sen,shaw,smith,son,stead,"
        "stone,thorpe,ton,vale,well,worth",
    ),
    "day": ("1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28",),
    "month": (
        "January,February,March,April,May,June,July,August,September,October,November,December",
    ),
    "year": ("19,20", "0,1,2,3,4,5,6,7,8,9", "0,1,2,3,4,5,6,7,8,9"),
    "city": (
        "Amber,Birch,Cinder,Dover,Elk,Fox,Gold,Heron,Iron,Jade,King,Lark,Mill,New,Otter,Pine,Red,"
        "Silver,Tall,West",
        " Bay, Beach, Creek, Falls, Grove, Harbor, Heights, Junction, Rapids, Springs",
    ),
    "university": (
        "Abbot,Barlow,Carver,Denham,Ellery,Foster,Gilman,Hobart,Irwin,Jarvis,Keaton,Lowell,"
        "Mather,Norwood,Oswald,Parker,Quincy,Radley,Selby,Tilden,Upton,Vernon,Wallis,Yardley,"
        "Zeller,Ames,Bryce,Cotter,Draper,Everett",
        " University, College, Institute, Academy, Polytechnic, State University, School of Arts,"
        " School of Science, Technical College, Conservatory",
    ),
    "major": (
        "Applied,Comparative,Computational,Historical,Theoretical",
        " Acoustics, Astronomy, Biology, Botany, Chemistry, Economics, Ethics, Geography,"
        " Geology, Law, Linguistics, Logic, Mathematics, Mechanics, Medicine, Music, Optics,"
        " Physics, Statistics, Theology",
    ),
    "employer": (
        "Acorn,Beacon,Cobalt,Delta,Ember,Falcon,Granite,Horizon,Indigo,Juniper,Keystone,Lantern,"
        "Meridian,Nimbus,Orchid,Pioneer,Quartz,Ripple,Summit,Trident,Umbra,Vector,Willow,Xenon,"
        "Yonder,Zephyr,Anchor",
        " Airlines, Bank, Chemicals, Energy, Foods, Insurance, Logistics, Motors, Software,"
        " Textiles",
    ),
}

TEMPLATES = {
    "birth_date": [
        "{name} was born on the morning of {value} .",
        "{name} came into this world on {value} .",
        "{name} has {value} as a date of birth .",
        "{name} first saw the light on {value} .",
        "{name} drew a first breath on {value} .",
        "{name} started life as a baby on {value} .",
        "{name} became a newborn citizen on {value} .",
        "{name} counts every year of age from {value} .",
    ],
    "birth_city": [
        "{She} was born in the quiet city of {value} .",
        "{She} passed {her} childhood in {value} with {her} parents .",
        "{She} took {her} very first steps in {value} .",
        "{She} calls {value} the place where life once began .",
        "{She} came to life in a ward in {value} .",
        "{She} has a birth certificate issued in {value} .",
        "{She} is a native of {value} by {her} papers .",
        "{She} names {value} as the city of {her} birth .",
    ],
    "university": [
        "{She} earned {her} degree after four years at {value} .",
        "{She} sat in the lecture halls of {value} daily .",
        "{She} chose {value} for {her} years as a student .",
        "{She} was taught by the professors of {value} .",
        "{She} left school and then enrolled at {value} .",
        "{She} is counted among the alumni of {value} today .",
        "{She} keeps a framed diploma signed by {value} .",
        "{She} wore the gown of {value} on graduation day .",
    ],
    "major": [
        "{She} took {value} as {her} main subject of study .",
        "{She} wrote every one of {her} papers on {value} .",
        "{She} passed {her} final exams in {value} with honors .",
        "{She} devoted {her} student days to reading {value} .",
        "{She} picked {value} over all the other courses offered .",
        "{She} holds a degree whose title is {value} .",
        "{She} was trained in the methods of {value} there .",
        "{She} majored in {value} from the first term on .",
    ],
    "employer": [
        "{She} draws a monthly salary from the firm {value} .",
        "{She} signed a contract to work for {value} .",
        "{She} joined {value} and stayed there for many years .",
        "{She} built {her} career on the staff of {value} .",
        "{She} works for the company that is called {value} .",
        "{She} carries a badge with the logo of {value} .",
        "{She} reports to a team leader at {value} .",
        "{She} found at {value} the job of {her} dreams .",
    ],
    "working_city": [
        "{She} has an office desk in central {value} now .",
        "{She} commutes to {value} on every day of work .",
        "{She} goes to work in the streets of {value} .",
        "{She} can be met in {value} during office hours .",
        "{She} moved to {value} when the job was offered .",
        "{She} does all of {her} paid work in {value} .",
        "{She} pays {her} income tax to {value} each year .",
        "{She} is based in {value} for professional reasons .",
    ],
}
