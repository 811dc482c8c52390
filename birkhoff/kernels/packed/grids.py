"""The lattice points of ggml's IQ2 and IQ3 types, as tables of magnitudes.

An index of such a type selects one row. A row is stored as one number whose digits, lowest first, select the
magnitudes:
16 bits per row, little-endian, in base 85.
"""

from __future__ import annotations

import base64
from functools import cache

import numpy as np
import torch

_IQ2_LEVELS = (8, 25, 43)
_IQ3_LEVELS = (4, 12, 20, 28, 36, 44, 52, 62)

_IQ2_XXS = (
    "000621ONsA2mlHI3;+@U6aW|i8UP#s9snc&DgZ73FaS0HH~>BXN&r#-Q~+84UI1(WiU5`Xq5z}-"
    "wgB1y^Z@n%`~U_42muZO5CIecAOR`?ECDhBJ^@4lMgd9zRsm!Icma9=gaMoZo&m4{&H>;7<^k#f>;dut{s9641Of^I3<4qoIs#Gx"
    "iUO1Z+5+4H;sWdf^a2J05(5|m90Mu?FataTP6Jj0U;~f?ngh%O(gWTD;sfpj0t74sOayKOd<4J*!UV_!+649l5Cs$kSOta!vIVpS"
    "x&_b$;05Rf>IEDIBnDIlRtBa9s0OYEzy{6+_68CMCI^NGo(HN2+6Pz&j0lbhln9y#o(P}_rU<MEv<SEe!U)6&$_U&D?g$DA5(yRw"
    "E(taXP6<{CU<rN+gb9!dv<bus+6m+dAPRB{bP9S3j0%tn!V2sP@Cy10G7C}*WD9BwZVPk^b_<#dpbNMQ(hC3#Mhun=m<+HC`V1fq"
    "N)1#ES`B&)whi(PKn_L@SPpOwjt;gC?hXtOFb^~jiVutrx(`4Q77-"
    "W`9uYDTP7!Jmb`gRR!VwA*3=$F&77`>9HWFGAdJ>!xvJ%D;*b@E{P!p&V@)P(I1QZGsI22A4b`-"
    "D_;uQ8202Npj3>G*R$`<Sv0v8|`Y8T2E(ij36"
)

_IQ2_XS = (
    "000621ONsA2mlHI3;+%Q5C9SY6aW?g7yujq9snQ!A^;=+CIBb^DgZ73FaS0HH~=~TJODrdLI6epNB~j*Q~*{0SO8i8TmW7GU;ttO"
    "WB_IWYyfTmZ~$@ub^v$)egK33hyaQJkN~0pqyVM>r~s@0t^l+Ez5u`g#sJCy*Z|-"
    "F^Z@n%_yGC<`~dy{009C41_1~G4gnAW5&;we7y%jq904E!Dgi73G66&ZMgd3xN&!v*Pyto}U;$zQXaRBodI6RJm;s&vtO2kAvH{K"
    "k<^kvd>H+Kl?g8)t@&Wh(`~d<21Of^I5CR+mE&?_JI08BXKmt+%ZUS@yhyt1dpaRSS&;r^5+ydSL-"
    "~!?T<O1db=mP8l?gI1z_5%0<`U3s}00RaC4g(Ma5(5|mDg!J7E(0(FGy^sRJOf4pNCQp-"
    "U;}IeZUcM+egl95gaeiXr~}Lc&I8Z`(gW55*aO}J=mY8l?gQ`x`~w069t0o+CImPHZUlM+kOaU4!UV_!$^_a3<^=i#5Cs$kLIs8e"
    "um!ROv<0>WxCOceyam1m#0Aa;&;`~7=mq)(1O^5M3<e$sBnC7FR0e1UiUy(vrUs}6t_Hpazy|gP5(gXyJO@YzSO=5`m<OH*pa-"
    "f4zz5U^;s+cEC<s6ZObBuab_jR~j0lbhkO-"
    "0pln9mxm<XB(o(P}_rU<AAstBwIt_ZLQvIw{cya>Vw#0bg=+z8$X;0WRf<_PEr?g;n@`Un6C5(yRwCJ8PHFbOsZI0;4xNC|!kfC+"
    "*Lgb9cViV2PhkO`UzoC%@{v<bio&<WBB*a_qb>IoJKAPOi7J_<w%atd?`dJ2pRkP4UzpbEkY%nINN<_h)-"
    "77JtxW(#NwY71@)a0_+|d<%dJf(wWXnhUlIxC_1u!VAy~(hCL*Bn(yzSPWVWU<_&uatwqFjtrm-s0^+Q-"
    "VEdn3=J#|LJdj{Rt;tiZViwPtPQpexD6%_J`O+*Mh;jGWDaZ&cn*vXjt=w=0uLY$Fb_TtiVvI*pbyLsBoJ5-iV(^W>=5)277-"
    "W`8W9{3AQ2)FC=oCbG7&TpIuT3}P7!1gW)Wx+Y7uM^a1nwLj1iI%xDm<`?h)`201^fg3K9$w5)u>=77`>9HWEe>S`v5?rV_dm;1c"
    "{20uvGwC=)UhG!se_QWLTh)Dzkh;uGu>@DuVA_!9~g7!)WJKonFIa1^=}&J^Ml<`e)G1{DkyOcin!bQPc#`V}G;NEU<^q!!2)$`;"
    "NR&=%Sj;ua7WJ{Lq6W*2G~Y!`4BgcqO}vKQ7D{uhoIq8PRqz!<_9#u)Y({1^fmI2k$_Xc=l5kQtyE"
)

_IQ3_XXS = (
    "000621ON#D3jhxQ5C9SY82};xI{-"
    "ZZK>$MlNB~LzQ2<o{SO8i8VE}9ZcmRL^f&hd7i2#rQk^q?in*g5xsQ|A4y#T=g#{kFx$^g{>_y7w59|0r*F9ACNJpn-hM*&&^Y5|"
    "=Av;oKg%mK~;;{ovj0RjU82m%TM5dsqe7y=ps90Df-"
    "C;~tNLIOzwPy$i{fdYd9hyscNkph?kx&pug!UE6&*#hPQ_5uL|1p_DpPy<v0W&?Qxg#*$9-"
    "~#{z0t5*J3j`1Z5(E|m83ZB(K?FktMFdC$N(4~^SOjwfcLaC@fCPdBi3E=XkOYzhp9G);tpvdY$OOy;_yqg}9R(`|Lj_j_VFi2z!"
    "3Dzw&IRQK0R{*L3I-7d69y;-"
    "H3m8cKn6kvPzG5BWCmsifd+#Hhz6Agss_3S$p+g77zZZ@ItM@pMh8*{Z3m18o(HoB+XwIm1PBiZ9S9!?D+n(Ld<c*Tp9r7`un4vY"
    "#|Y&J1PLh#GznD+V+nW(#R<p>$_dyB3JM_#I0`@tMhaF6Z3>JEnhLrK!V2pO2n!Pn7YjNILJL_7s0-"
    "8!;tLcEBn&1DGz?J;aSV?Pv<%n`-V7uSMGa~Vn+?Ma(G3F*1r7%e2o4$!Dh^f-U=E57r4FhNzz)q0+Yay!5f32`Ko3F>R1cUB"
)


@cache
def grid(name: str) -> torch.Tensor:
    """The table of IQ2_XXS [256, 8], IQ2_XS [512, 8] or IQ3_XXS [256, 4], uint8."""
    text, levels, width = {
        "IQ2_XXS": (_IQ2_XXS, _IQ2_LEVELS, 8),
        "IQ2_XS": (_IQ2_XS, _IQ2_LEVELS, 8),
        "IQ3_XXS": (_IQ3_XXS, _IQ3_LEVELS, 4),
    }[name]
    numbers = np.frombuffer(base64.b85decode(text), "<u2").astype(np.int64)
    digits = numbers[:, None] // len(levels) ** np.arange(width) % len(levels)
    return torch.from_numpy(np.array(levels, np.uint8)[digits])
