"""The names that the birth-year probes are about: a million combinations, plain ASCII.

Part of the frozen sets' identity: changing them changes every set (`birth_year.VERSION`).
"""

FIRST_NAMES = tuple(
    """
    Aaron Abigail Adam Alan Alice Amanda Amber Andrea Andrew Angela Anna Anthony Arthur Ashley
    Barbara Benjamin Beth Brandon Brian Bruce Carl Carol Catherine Charles Cheryl Christine Clara
    Claire Craig Cynthia Daniel David Deborah Dennis Diana Donald Dorothy Douglas Edward Eleanor
    Elizabeth Emily Emma Eric Ethan Eugene Evelyn Frances Frank Gary George Gloria Grace Gregory
    Hannah Harold Heather Helen Henry Howard Irene Isaac Jack Jacob James Janet Jason Jean Jeffrey
    Jennifer Jessica Joan John Jonathan Joseph Joyce Judith Julia Justin Karen Katherine Keith
    Kenneth Kevin Kimberly Kyle Larry Laura Lawrence Linda Lisa Louis Margaret Maria Mark Martha
    Martin Mary Matthew Melissa Michael Michelle
    """.split()
)
MIDDLE_NAMES = tuple(
    """
    Ada Albert Alfred Allen Amelia Amos Annette April Audrey Austin Beatrice Belle Bernard Blake
    Blanche Boyd Cecil Celia Chester Clark Clay Clifford Cora Daisy Dale Dean Dexter Drew Earl
    Edith Edmund Elaine Ellis Elmer Elsie Ernest Esther Eve Faith Felix Fern Fletcher Flora Floyd
    Ford Franklin Gail Gene Gilbert Glenn Hazel Herbert Homer Hope Hugh Ida Ivy Jade Jasper June
    Kay Kent Lane Lee Leo Leon Leslie Lewis Lloyd Lorraine Louise Lucille Luther Lynn Mabel Mae
    Marie Marshall Maxine May Miles Milton Monroe Neil Nora Olive Opal Oscar Otis Pearl Penelope
    Percy Quentin Ray Reed Rose Ruby Sage Silas Wade
    """.split()
)
LAST_NAMES = tuple(
    """
    Adams Alexander Anderson Armstrong Bailey Baker Barnes Bell Bennett Brooks Brown Bryant Butler
    Campbell Carter Clarke Coleman Collins Cook Cooper Cox Crawford Davis Dixon Duncan Edwards
    Evans Ferguson Fisher Foster Fox Gibson Gordon Graham Grant Gray Green Griffin Hall Hamilton
    Harris Harrison Hayes Henderson Hicks Hill Holmes Hughes Hunt Jackson Jenkins Johnson Jones
    Jordan Kelly Kennedy King Knight Lambert Lawson Long Marsh Mason Miller Mills Mitchell Moore
    Morgan Morris Murphy Murray Nelson Palmer Parker Patterson Perkins Perry Peters Phillips Porter
    Powell Price Reynolds Richardson Roberts Robinson Rogers Ross Russell Sanders Scott Shaw Simmons
    Simpson Smith Stevens Sullivan Taylor Thompson Turner
    """.split()
)
